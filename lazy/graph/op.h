#pragma once

#include <cstdint>
#include <string>
#include <vector>

// What the recorder, the passes and the plan know of an operator. One `Op` exists per registered
// overload for the life of the process, so a pointer identifies it; `id` identifies it across
// processes.
namespace acc::graph {

// How an argument that is not a tensor enters memo and plan keys.
//  kStructure: by value. Another value is another plan.
//  kValue:     by kind (bool, int, float, complex) only, because the kind decides type promotion.
//              The number itself lives in the step's value block and changes from run to run.
//              Beside integer tensors those of more than 32 bits are structure: what ATen makes of
//              a number that the tensor's type cannot hold differs from operator to operator.
//  kWide:      as kValue, integers of 64 bits: seeds and what else random operators are told.
enum class Role : uint8_t { kStructure, kValue, kWide };

// The element type of a list argument, which an empty list does not tell by itself.
enum class ListOf : uint8_t {
  kNone,
  kTensor,
  kOptionalTensor,
  kInt,
  kFloat,
  kBool,
  kScalar,
  kString
};

struct Argument {
  std::string name;
  Role role = Role::kStructure;
  ListOf list = ListOf::kNone;
  bool writes = false;        // declared in the schema, or added by the op table
  bool out = false;           // an out= argument, which takes the geometry of the result
  bool is_type = false;       // an element type, as its number
  bool integers = false;      // must hold integers or booleans
  bool scales = false;        // `alpha`: a factor, 1 by default
  bool cpu_ok = false;        // takes CPU tensors of one or more dimensions (indices)
  bool reads_on_cpu = false;  // takes those alone, which it reads there
  bool checked = false;  // a number that the tensor's type has to hold, or the call is an error
};

struct Return {
  int alias = -1;     // index of the argument that is returned; -1: a fresh value
  bool list = false;  // a list of tensors, all fresh
};

struct Op {
  std::string name;  // "aten::add.Tensor"
  uint64_t id = 0;   // stable hash of the name
  std::vector<Argument> arguments;
  std::vector<Return> returns;
  bool writes = false;         // any argument is written
  bool removable = true;       // may vanish when nothing reads what it makes
  bool mergeable = true;       // two equal nodes have equal results (not random, not uninitialised)
  bool pointwise = false;      // each result element depends on the operands' elements at its place
  bool casts_numbers = false;  // see op_table.h
  bool precision_sensitive = false;  // multiplies: the precision of float32 products matters
  bool communicates = false;         // with other processes: keeps its place among others that do
  // Owned by the dispatcher edge and opaque here: how the executor calls the operator, and its
  // overload that writes into given memory (null if the backend has no native one).
  const void* handle = nullptr;
  const void* out_handle = nullptr;
  // Of an operator on lists of tensors: what it does to each item. Null: it is no such operator, or
  // does something else.
  const Op* item = nullptr;
  // The same with the number as a tensor of no dimension; equal bits for float32 only.
  const Op* item_with_number = nullptr;
  // The arguments of the item's operator: which one of the list's operator it is, the first once
  // more for an `out`, or the words of a default that only the item's operator has.
  struct ItemArgument {
    int32_t from = -1;  // -1: `words`
    std::vector<int64_t> words;
  };
  std::vector<ItemArgument> item_arguments;
  // Of a product: the operator that adds it to a tensor, as (tensor, the product's arguments, beta,
  // alpha), and the one that does so in place. Null: it is no such operator.
  const Op* plus = nullptr;
  const Op* plus_in_place = nullptr;
  // Of a product of two matrices: aten::cat, to lay the rows of several below each other. Null: it
  // is none.
  const Op* cat = nullptr;
  // Of a product of two matrices: acc::linear, which makes large ones faster. Null: it is none, or
  // nothing is faster on this machine.
  const Op* linear = nullptr;
  // What does the work of a product and of its neighbour at once (lazy/passes/epilogues.h). Of
  // aten::addmm: with a ReLU or GELU behind it; of aten::mm: with the backward of a GELU behind it,
  // or with the sum of what it multiplies. Null: there is no such operator.
  const Op* with_relu = nullptr;
  const Op* with_gelu = nullptr;
  const Op* with_gelu_backward = nullptr;
  const Op* with_sum = nullptr;
  // Of a product or convolution: aten::copy_, to change the type or layout of what it reads and
  // makes. Null: it is neither.
  const Op* copy = nullptr;
  bool convolves = false;
  bool multiplies_bf16 = false;  // this processor has instructions for it
  // The same outside of training, where it writes less, and which argument says that it trains.
  // Null: that makes no difference.
  const Op* evaluates = nullptr;
  uint32_t training = 0;
  // Of what communicates: what waits for its end (lazy/passes/transfers.h). Null: it is over when
  // the call returns.
  const Op* await = nullptr;
};

}  // namespace acc::graph
