"""Which tests gpu_check.py runs."""

# Tests that only a GPU can pass, wherever they stand, are marked so.
MARKED = "gpu"
# What no other file tells comes first. Of attention with dropout a few cases tell most in seconds.
MARKED_FIRST = "test_captured_on_cuda"
FEW_MARKED = "not test_attention_dropout or flash-one or efficient-one or keeps_no_scores"
# How many there are, for which gpu_check.py has time: with the few, and all.
FEW_MARKED_TESTS, MARKED_TESTS = 35, 68
# Tests of what differs between executors: memory, streams, captured plans, kernels, numbers.
TESTS = (
    "test_captured_plans",
    "test_captured_loops",
    "test_report",
    "test_drawing_kernels",
    "test_drawing_plans",
    "test_reductions_in_parts",
    "test_epilogues",
    "test_fusion",
    "test_reductions",
    "test_rows",
    "test_rnn",
    "test_attention_ops",
    "test_flash_attention",
    "test_copies",
    "test_device",
    "test_event",
    "test_stream",
    "test_generator",
    "test_random",
    "test_memory_api",
    "test_custom_ops",
    "test_fork",
)
MODELS = ("tests/models/test_fused.py", "tests/models/test_plans.py")
# Of programs and models what tells most in seconds.
PROGRAMS = (
    "train_adamw",
    "train_sgd_momentum",
    "gradient_accumulation",
    "lr_scheduler",
    "ema_of_weights",
    "transformer_layer",
    "conv_net",
    "lstm_module",
)
FEW_PROGRAMS = f"captured and ({' or '.join(PROGRAMS)})"
FEW_MODELS = "adamw and (mlp or gpt)"
# A few operators of each kind: the part opinfo takes all.
OPERATORS = (
    "add",
    "mul",
    "div",
    "where",
    "exp",
    "sum",
    "var",
    "cumsum",
    "sort",
    "index_put",
    "scatter_add",
    "addmm",
    "bmm",
    "softmax",
    "nn.functional.conv2d",
    "nn.functional.batch_norm",
    "nn.functional.layer_norm",
    "nn.functional.embedding",
    "nn.functional.cross_entropy",
    "nn.functional.scaled_dot_product_attention",
)
