#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
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
  // Of a run that has ended, or stopped: `outputs` are about to be handed out.
  void remember(const record::Trace& trace, const exec::Outcome& outcome,
                const std::vector<exec::Output>& outputs);

  // Work that was captured as `number` is about to be submitted with the inputs `given`. It may
  // write over its own results and over those of later captures. Who still has one gets a copy, and
  // does not notice, unless he was told the address or is just reading.
  exec::Way make_way(uint64_t number, std::vector<exec::Given>& given, c10::DeviceIndex device);

 private:
  struct Result {
    c10::weak_intrusive_ptr<c10::StorageImpl> memory;
    std::weak_ptr<const uint64_t> keeper;  // has the memory too
    c10::weak_intrusive_ptr<record::LazyStorage> storage;
  };
  static exec::Way move_away(const Result& result, std::vector<exec::Given>& given,
                             c10::DeviceIndex device);

  std::map<uint64_t, std::vector<Result>> results_;  // by the number of the capture
};

}  // namespace acc::session
