#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/library/aten_call.h"
#include "lazy/plan/plan.h"

// Generated kernels, called with what their steps say.
namespace acc::exec {

// What the kernels of a plan are called with: words that the host writes, and the same in the
// memory of the device, where kernels read them.
class ArgumentTable {
 public:
  explicit ArgumentTable(c10::DeviceIndex device) : device_(device) {}
  ArgumentTable(const ArgumentTable&) = delete;
  ArgumentTable& operator=(const ArgumentTable&) = delete;

  // Room for so many words; where they are. No more once there is memory.
  size_t add(size_t words);
  // Room for so many more in the device's memory only, whose address the word at `at` becomes.
  void add_work(size_t at, size_t words);
  // The memory. Not from a pool of captured work, whose blocks that work writes over before kernels
  // read what was uploaded.
  void allocate();
  int64_t* words(size_t at) { return words_.data() + at; }

  // The words from `begin` to before `end` go to the device, in order with what is submitted there.
  void upload(size_t begin, size_t end);
  void upload_all() { upload(0, words_.size()); }

  // Writes a word, and notes where it has changed.
  void set(size_t at, int64_t word) {
    if (words_[at] == word) return;
    words_[at] = word;
    changed_begin_ = std::min(changed_begin_, at);
    changed_end_ = std::max(changed_end_, at + 1);
  }
  // From the first to the last of the words that were noted since this last ended well.
  void upload_changed();
  const int64_t* on_device(size_t at) const {
    return static_cast<const int64_t*>(memory_.get()) + at;
  }

 private:
  const c10::DeviceIndex device_;
  std::vector<int64_t> words_;
  size_t changed_begin_ = SIZE_MAX;  // none
  size_t changed_end_ = 0;
  struct Work {
    size_t at;
    size_t begin;  // behind the words
  };
  std::vector<Work> work_;
  size_t work_words_ = 0;
  c10::DataPtr memory_;
};

// A word of the table that follows a buffer's address, or a number of the step's value block.
struct TableWord {
  uint32_t of;  // the buffer, or where the number stands
  size_t at;    // in the table
  int64_t byte_offset = 0;
};

// The calls of one step's kernel, ready to be made again and again.
class KernelCall {
 public:
  virtual ~KernelCall() = default;
  KernelCall(const KernelCall&) = delete;
  KernelCall& operator=(const KernelCall&) = delete;

  // Takes the memory that the slots point at now, and the numbers of this step, into the table.
  void set(std::span<const int64_t> values);
  // Which words that were.
  void list(std::vector<TableWord>* addresses, std::vector<TableWord>* numbers) const;
  void upload() { table_.upload(begin_, end_); }
  // With what was uploaded last. Who submits it counts its launches: captured work that is
  // submitted again calls nothing here.
  virtual void launch() const = 0;
  virtual size_t launches() const = 0;

 protected:
  KernelCall(const plan::Plan& plan, const plan::Step& step,
             const std::vector<library::Slot>& slots, ArgumentTable& table);

  // The next call's place in the table, behind which its words stand in a row.
  void place(const passes::Launch& launch, size_t at);
  size_t add(size_t words) {
    const size_t at = table_.add(words);
    end_ = at + words;
    return at;
  }

  const codegen::KernelSpec& kernel_;
  ArgumentTable& table_;

 private:
  struct Place {
    const passes::Launch* launch;
    size_t at;      // of its pointers
    size_t memory;  // begin of its operands
  };

  const std::vector<library::Slot>& slots_;
  size_t begin_;  // in the table
  size_t end_;
  std::vector<Place> places_;
  std::vector<const c10::StorageImpl*> memory_;  // per operand of all launches
};

// `function`: what the toolchain of the device made of the kernel.
std::unique_ptr<KernelCall> make_kernel_call(const plan::Plan& plan, const plan::Step& step,
                                             void* function,
                                             const std::vector<library::Slot>& slots,
                                             ArgumentTable& table, c10::DeviceIndex device);

}  // namespace acc::exec
