#pragma once

#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "lazy/exec/runner.h"
#include "lazy/record/recorder.h"
#include "lazy/record/storage.h"

namespace acc::session {

// What captured work of a device has made, and is going to write again, while somebody has it. Not
// thread safe: the mutex of the device's recorder guards it.
class CapturedResults {
 public:
  // Of a run that has just ended, before its results are handed out.
  void remember(const record::Trace& trace, const exec::Outcome& outcome);

  // Work that was captured as `number` is about to be submitted with the inputs `given`. It may
  // write over its own results and over those of later captures; who still has one gets a copy, and
  // does not notice. False where that cannot be, because he was told the address or is just
  // reading.
  bool make_way(uint64_t number, std::vector<exec::Given>& given, c10::DeviceIndex device);

 private:
  struct Result {
    c10::weak_intrusive_ptr<c10::StorageImpl> memory;
    std::weak_ptr<const uint64_t> capture;  // shares the memory while it exists
    c10::weak_intrusive_ptr<record::LazyStorage> storage;
  };
  static bool move_away(const Result& result, std::vector<exec::Given>& given,
                        c10::DeviceIndex device);

  std::map<uint64_t, std::vector<Result>> results_;  // by the number of the capture
};

}  // namespace acc::session
