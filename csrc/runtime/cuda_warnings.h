#pragma once

#include <c10/util/Exception.h>

namespace acc::runtime {

// While it lives, this thread does not warn of a CUDA graph without nodes. Torch takes one for a
// mistake of its user, but operators on tensors without elements launch nothing.
class EmptyGraphsAllowed final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    if (!warning.msg().starts_with("The CUDA Graph is empty")) others_->process(warning);
  }

 private:
  c10::WarningHandler* const others_ = c10::WarningUtils::get_warning_handler();
  const c10::WarningUtils::WarningHandlerGuard guard_{this};
};

}  // namespace acc::runtime
