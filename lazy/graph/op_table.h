#pragma once

#include <cstddef>
#include <string>
#include <string_view>

// The reviewed facts about operators that their schemas do not state. Everything else follows from
// the schema by the rules in csrc/aten/schema.cpp; `tests/python/test_op_table.py` prints what
// another torch version adds or drops.
namespace acc::graph::table {

// Never recorded: decided on the host, data-dependent, or better decomposed by PyTorch. `name` is
// without overload ("aten::item").
bool runs_directly(std::string_view name);

// An argument that is written although the schema does not say so.
bool writes_undeclared(std::string_view name, std::string_view argument);

// A number that is structure (see Role): it decides a shape or which kernel runs.
bool is_structure(std::string_view name, std::string_view argument);

// An argument that may be a CPU tensor of one or more dimensions.
bool takes_cpu_tensor(std::string_view name, std::string_view argument);
// A tensor that has to be on the CPU while its operator runs.
bool reads_on_cpu(std::string_view name, std::string_view argument);

// A number that the type of the tensor has to hold.
bool must_fit(std::string_view name, std::string_view argument);

// May not vanish although nothing reads its result.
bool must_run(std::string_view name);

// A collective, or a transfer between two processes: all processes do these in the same order.
bool communicates(std::string_view name);

// An argument that must hold integers or booleans, which the kernel checks and Meta does not.
bool needs_integers(std::string_view name, std::string_view argument);

// The precision of float32 products changes its result.
bool multiplies(std::string_view name);

// One of these that may get its operands, and give its results, in another type or layout.
bool converts(std::string_view name);

// A result that is a CPU tensor on every device (the batch sizes of packed sequences).
bool returns_to_cpu(std::string_view name, size_t result);

// An operator on lists that does to each item what the operator of that name does: "aten::add_" for
// "aten::_foreach_add_". Empty for all others.
std::string item_operator(std::string_view name);

// The operator that adds a product to a tensor: "aten::addmm" for "aten::mm". Empty for all others.
std::string plus_operator(std::string_view name);

// A product of two matrices, plain or added to something.
bool multiplies_matrices(std::string_view name);

// A convolution as it is recorded, forward or backward.
bool is_convolution(std::string_view name);

// Arithmetic whose number operands may be cast to float32 beforehand when all tensors are float32:
// its kernels begin with that.
bool casts_numbers(std::string_view name);

// An out overload that is another computation than its functional form, or copies.
bool avoid_out(std::string_view name);

}  // namespace acc::graph::table
