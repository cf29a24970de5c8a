#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "csrc/runtime/ambient.h"
#include "csrc/runtime/backend.h"
#include "lazy/exec/profile.h"
#include "lazy/exec/run.h"
#include "lazy/exec/runner.h"
#include "lazy/plan/plan.h"

// Schedules as captured work: on a GPU a step of training is then one CUDA graph.
//
// A run of a schedule is captured in pieces, as few as can be: steps that cannot be captured run in
// between. The work of a piece has the memory and the numbers that it was captured with. Generated
// kernels read theirs anew each time; operators of ATen do not, so each run asks first whether what
// they were given is the same (`fits`).
namespace acc::exec {

// What a schedule's captures have to do without, learnt from those that failed or did not fit.
struct CaptureLimits {
  std::vector<bool> outside;                      // per step: is called between the pieces
  std::string (*text)(uint32_t place) = nullptr;  // for people
  // Per buffer, of inputs: how often it lay elsewhere soon after a capture; lies elsewhere from run
  // to run, and is copied to a place of its own.
  std::vector<int> moved;
  std::vector<bool> copied;
  int begun = 0;      // captures, but for those that were worth it, or wanted for memory
  int no_memory = 0;  // captures that found none or were dropped for it, since one was worth it
  int passed = 0;     // runs that are not captured, while memory is short
  bool postponed = false;  // since the last capture was begun

  // The step is called between the pieces, and so is what waits for a transfer that it begins.
  // False: it was so before.
  bool leave_outside(const plan::Plan& plan, const plan::Schedule& schedule, size_t step);

  // A capture was for nothing, since memory is short: there is another one soon, or later. What is
  // dropped before the next begins is dropped for the same lack, which counts once.
  void postpone();
};

class Captured {
 public:
  // Begins a run that is captured: memory comes from the backend's pool until `finish` or
  // `give_up`.
  Captured(const plan::Plan& plan, const plan::Schedule& schedule, c10::DeviceIndex device,
           CaptureLimits& limits, std::span<const int64_t> values);

  // The memory of that run. Takes the inputs out of `given`.
  Run begin(std::vector<Given>& given);

  // Whether the step belongs to a piece.
  bool takes(size_t step) const { return capturing_ && !limits_.outside[step]; }
  // The step was submitted, as the next one of the piece.
  void note(size_t step);
  // The piece is about to end.
  void join_transfers();
  void add_piece(size_t begin, size_t end, std::unique_ptr<runtime::CapturedWork> work);
  // A step that cannot be captured was submitted.
  void add_outside(size_t step) {
    if (capturing_) pieces_.push_back({step, step + 1, nullptr});
  }
  // All of the steps were. Nothing happens after `give_up`.
  void finish(const Run& run);
  // The rest of the run goes step by step, and nothing is captured. The pool's memory is that of
  // others, once this run has let go of it.
  void give_up() noexcept;
  // Whether the run has been captured to its end.
  bool captured() const { return captured_; }

  // Whether the work can be submitted again for these inputs and numbers.
  bool fits(const std::vector<Given>& given, std::span<const int64_t> values) const;
  // Where it cannot: notes what the next capture has to do without. What moves again and again is
  // copied; where steps write it, they are called between the pieces.
  void learn(const std::vector<Given>& given, std::span<const int64_t> values);
  // Whether it was submitted so often that it may just as well be captured anew.
  bool was_worth_it() const { return submitted_ >= kWorthIt; }

  // What goes with a submission.
  struct Submission {
    runtime::AmbientScope& ambient;
    Profile& profile;
    const std::vector<bool>& needed;  // per node, is what it makes; empty: all of it is
    size_t* step;                     // becomes the one that is on its way, for errors
  };
  // Points it at the inputs: what is where it was, and numbers that are what they were, cost no
  // more than being compared. Then `go_on` submits it.
  void begin(const std::vector<Given>& given, std::span<const int64_t> values);
  // Submits what has not been submitted yet.
  void go_on(std::span<const int64_t> values, const Submission& submission);
  // Where that threw: whether the step that was on its way has changed nothing, so that `go_on`
  // can make it again.
  bool may_go_on() const;

  // What the plan keeps, which the work writes anew each time.
  const std::vector<Output>& outputs() const { return outputs_; }

  // About how much of the host's memory it takes, without the kernels.
  uint64_t host_bytes() const;

  // Captured later is larger. What was captured before another work knows nothing of that one's
  // results, and may write over them: they were not there when its memory was chosen.
  const std::shared_ptr<const uint64_t>& number() const { return number_; }

 private:
  struct Piece {
    size_t begin;
    size_t end;
    std::unique_ptr<runtime::CapturedWork> work;  // null: a step that is called
    size_t launches = 0;                          // of kernels, by the work
  };
  struct FixedNumber {
    uint32_t value;  // in the step's value block
    uint32_t step;
    int64_t bits;
  };
  struct FixedAddress {
    uint32_t buffer;
    const void* address;
  };
  // A buffer that is given: what its slot points at since the last submission, and the words of the
  // table that follow it.
  struct Input {
    uint32_t buffer;
    const char* address;
    size_t nbytes;
    std::span<const TableWord> words;
  };

  // What a capture costs, in submissions: a guess, it is a run and a bit.
  static constexpr int kWorthIt = 8;
  // A written input may move so often and be captured where it is: it may be in two places by
  // turns.
  static constexpr int kMostMoves = 2;

  void find_extents();
  void find_inputs(const std::vector<Given>& given);
  void copy_input(uint32_t buffer, const Given& given);
  void point(Input& input, const Given& given);
  void has_moved(uint32_t buffer);
  void leave_outside(size_t step, const char* why);
  void fix(size_t step);
  bool is_needed(size_t step) const;
  void prepare_for(size_t step);
  void call_outside(size_t step, std::span<const int64_t> values);
  void repeat(const PreparedStep& step, std::span<const int64_t> values,
              const std::vector<library::Slot>& slots);

  const plan::Plan& plan_;
  const plan::Schedule& schedule_;
  const c10::DeviceIndex device_;
  CaptureLimits& limits_;
  std::shared_ptr<const uint64_t> number_;
  const std::unique_ptr<Prepared>
      prepared_;                         // before the pool: it has memory that is not from there
  std::unique_ptr<runtime::Pool> pool_;  // null when it was given up
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  bool capturing_ = true;
  bool captured_ = false;
  int submitted_ = 0;
  std::vector<int64_t> values_;  // at the time of the capture
  std::vector<Piece> pieces_;
  std::vector<c10::Storage> copies_;  // per buffer, of the inputs that are copied
  std::vector<int64_t> extents_;      // per buffer: bytes that steps touch
  std::vector<bool> written_;         // per buffer
  std::vector<FixedNumber> numbers_;
  std::vector<FixedAddress> addresses_;
  std::vector<Input> inputs_;             // that are not copied
  std::vector<uint32_t> copied_;          // those that are
  std::vector<TableWord> address_words_;  // of all kernels, buffer by buffer
  std::vector<TableWord> number_words_;
  bool filled_ = false;  // the table was, and `inputs_` are what slots point at
  std::vector<Output> outputs_;
  const Submission* submission_ = nullptr;  // while there is one
  size_t piece_ = 0;
  bool in_piece_ = false;  // it has been submitted in part
};

// The captures of a schedule.
class Captures {
 public:
  // `text`: of the place in the user's program where an operator was recorded.
  Captures(const plan::Plan& plan, const plan::Schedule& schedule,
           std::string (*text)(uint32_t place));

  // What can be submitted for these inputs and numbers; null when nothing can.
  Captured* find(const std::vector<Given>& given, std::span<const int64_t> values);

  // Whether the next run is worth capturing. Where captures never fit it is not; where they find no
  // memory, or are dropped for it, the next one is, and then one of 2, 4, 8 and so on.
  bool wants_more();
  // For the capture that was begun last.
  void found_no_memory();
  std::unique_ptr<Captured> begin(const plan::Plan& plan, const plan::Schedule& schedule,
                                  c10::DeviceIndex device, std::span<const int64_t> values) {
    ++limits_.begun;
    limits_.postponed = false;
    return std::make_unique<Captured>(plan, schedule, device, limits_, values);
  }
  void keep(std::unique_ptr<Captured> captured);
  void drop(const Captured* captured);
  // For their memory.
  void drop_all();
  uint64_t host_bytes() const;
  // The step cannot be captured, none can; `error` said so. Users are told once.
  void leave_outside(size_t step, const std::exception_ptr& error);
  void leave_all_outside(const std::exception_ptr& error);

 private:
  // Two, for programs that alternate between two sets of parameters.
  static constexpr size_t kKept = 2;
  // Each failure teaches something, so that few are needed; what still changes then always will.
  static constexpr int kMost = 16;

  const plan::Plan& plan_;
  const plan::Schedule& schedule_;
  CaptureLimits limits_;
  std::vector<std::unique_ptr<Captured>> kept_;  // the last used first
};

}  // namespace acc::exec
