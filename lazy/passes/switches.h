#pragma once

#include <string>

// Which passes run. Each can be left out, to find out which one a fault comes from.
namespace acc::passes {

enum class Pass : unsigned char {
  kDce,
  kLists,
  kSplit,
  kCse,
  kCopies,
  kRows,
  kWiden,
  kLayout,
  kProducts,
  kEpilogues,
  kAccumulate,
  kTransfers,
  kFuse,
  kRecompute,
  kBatch,
  kOrder,
  kAlias
};

// False for those that ACC_SKIP_PASSES names.
bool enabled(Pass pass);

// Leaves out the passes in `names`, separated by commas, from now on. Plans that were made stay as
// they are. Throws base::Error for a name that is none.
void skip(const std::string& names);

}  // namespace acc::passes
