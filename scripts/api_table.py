"""What TorchAcc's and TI-ACC's documents promise their users, and what became of it here.

`api_docs.py` makes docs/api.md of it and holds every row against the code. Names are those below
`torchacc`, unless they begin with `tiacc_training`. The facts are those of TorchAcc 2.3
(AlibabaPAI/torchacc, its documents and signatures) and of TI-ACC's documents (Tencent Cloud, its
guide to training on CVM and the demo of the second generation). What they say of single calls is in
`api_cases.py`, under the names of the rows.
"""

from __future__ import annotations

from typing import NamedTuple

WORKS, DIFFERS, NOT_OFFERED = "works", "differs", "not offered"
REFUSED = "only the default"  # of options: what else it may be is refused


class Row(NamedTuple):
    """One documented name.

    `signature` is the documented one without types, empty for what is not called. `why`: in what it
    differs, or why it is not there.
    """

    name: str
    signature: str = ""
    verdict: str = WORKS
    why: str = ""


class Option(NamedTuple):
    """A field of `Config`, an option of a command or a variable, with its documented default."""

    path: str
    default: object
    verdict: str = WORKS
    why: str = ""


_SPMD = "there is no SPMD mode: each process runs its own program"
_TRACER = "a part of how TorchAcc traces a model for torch_xla"
_UTIL = "an internal helper of TorchAcc"

TOP = (
    Row(
        "accelerate",
        "(model, dataloader=None, config=Config())",
        DIFFERS,
        "`dataloader` is also called `loader`; without a config there is a new one for each call; "
        "any iterable is a loader, an empty one too; `torch.distributed` works afterwards with one "
        "process as well; `torch.optim` is left as it is; an optimizer may be built before, unless "
        "parameters are sharded or split: then its first step is an error that says so",
    ),
    Row("Config"),
    Row(
        "AsyncLoader",
        "(loader, device, buckets=None, max_length=None, num_buckets=8, pad_value_dict=None, "
        "batchdim=0, batches_per_execution=1, loader_prefetch_size=8, device_prefetch_size=4, "
        "host_to_device_transfer_threads=1, input_sharding=None)",
        DIFFERS,
        "`device` may be left out; `num_buckets=None` means 8; `device_prefetch_size` is 2, since "
        "batches that are ahead take memory of the device; what stands behind `pad_value_dict` is "
        "keyword only; `loader_prefetch_size`, `host_to_device_transfer_threads` and `batchdim` "
        "are without effect: one thread fetches and copies, in order; no `input_sharding` is taken",
    ),
    Row("AsyncLoader._loader", "", WORKS, "what was wrapped"),
    Row("AsyncLoader.__iter__", "()"),
    Row("AsyncLoader.__len__", "()"),
    Row(
        "amp.GradScaler",
        "(init_scale=2**16, growth_factor=2.0, backoff_factor=.5, growth_interval=2000, "
        "enabled=True, use_zero_grad=False)",
        WORKS,
        "an overflow is one for all processes that hold parts, not only those of a pipeline",
    ),
    Row("fetch_gradients", "(optimizer)"),
    Row("lazy_device", "()"),
    Row("is_lazy_device", "(device)", WORKS, "the type is `acc`, not `xla`"),
    Row("is_lazy_tensor", "(tensor)"),
    Row("sync", "(wait=False)"),
    Row("mark_step", "()"),
    Row("syncfree.SGD.step", "(closure=None, found_inf=None)"),
    Row("syncfree.Adam.step", "(closure=None, found_inf=None)"),
    Row("syncfree.AdamW.step", "(closure=None, found_inf=None)"),
    Row("get_global_context", "()"),
    Row("GlobalContext.config"),
    Row("GlobalContext.mesh", "", WORKS, "made when it is asked for"),
    Row(
        "GlobalContext.python_dispatcher",
        "",
        NOT_OFFERED,
        "nothing is dispatched in Python",
    ),
    Row("core"),
    Row("llm", "", NOT_OFFERED, "all it has for users is `patch_qwen_model`, below"),
    Row(
        "import_utils.is_torch_xla_available",
        "()",
        DIFFERS,
        "says whether there is a lazy device: torch_xla is not needed",
    ),
    Row(
        "decompose.replace_decompose",
        "()",
        NOT_OFFERED,
        "torch's decompositions are left as they are",
    ),
    Row(
        "patch",
        "",
        DIFFERS,
        "a function, which undoes with `unpatch`: see `docs/mixed-precision.md`. TorchAcc's module "
        "of this name patches at import",
    ),
    Row("__version__"),
)

CONFIG_METHODS = (
    Row(
        "Config.validate",
        "()",
        DIFFERS,
        "what is said of a wrong value names the field, its value and what to do, and a wrong type "
        "is told at the assignment",
    ),
    Row("Config.get_mesh", "()"),
    Row("Config.is_distributed_parallel", "()"),
    Row("Config.is_tracing_enabled", "()"),
    Row("Config.is_lazy_backend", "()"),
    Row("Config.is_eager_backend", "()"),
)

OPTIONS = (
    Option("backend", "lazy", REFUSED, "`ACC_MODE=eager` in the environment is the other"),
    Option("compute.fp16", False),
    Option("compute.bf16", False),
    Option(
        "compute.acc_scaled_dot_attn",
        False,
        WORKS,
        "without effect: torch's `scaled_dot_product_attention` is one operator on the device "
        "already",
    ),
    Option(
        "compute.disable_kernel_patches",
        False,
        WORKS,
        "without effect: no other library's kernels are patched",
    ),
    Option("memory.gc", False),
    Option("memory.gc_cls", None, DIFFERS),
    Option("memory.gc_cnt", None, WORKS, "without `fsdp` too"),
    Option("dataloader.buckets", None, WORKS, "a list, as documented; TorchAcc's check refuses it"),
    Option("dataloader.max_length", None, DIFFERS),
    Option("dataloader.num_buckets", None, DIFFERS, "None is 8"),
    Option("dataloader.pad_value_dict", None),
    Option("dist.dp.size", None, DIFFERS),
    Option("dist.tp.size", 1),
    Option("dist.pp.size", 1),
    Option("dist.pp.num_micro_batches", 1),
    Option("dist.pp.input_names", None),
    Option("dist.pp.split_points", [], DIFFERS),
    Option("dist.pp.broadcast_loss", True),
    Option("dist.fsdp.size", 1),
    Option("dist.fsdp.wrap_layer_cls", set(), DIFFERS),
    Option("dist.fsdp.flatten_parameters", True),
    Option(
        "dist.fsdp.sync_module_states",
        False,
        DIFFERS,
        "always done: every process starts from the first one's parameters and buffers",
    ),
    Option("dist.fsdp.use_spmd", False, REFUSED, _SPMD),
    Option("dist.fsdp.shard_output_callable", None, REFUSED, _SPMD),
    Option("dist.sp.size", 1),
    Option("dist.topology", ["dp", "fsdp", "pp", "tp"], DIFFERS, "`sp` may be named too"),
)

_DIMENSIONS = ("dp", "pp", "tp", "fsdp")

DIST = (
    Row("dist.world_size", "()"),
    Row("dist.rank", "()"),
    Row("dist.local_rank", "()"),
    Row("dist.init_process_group", "(config)"),
    Row("dist.init_nccl_context", "(config)"),
    Row("dist.rendezvous", "(tag, payload=b'', replicas=[])"),
    Row("dist.BACKEND_NAME"),
    Row("dist.EAGER_BACKEND_NAME"),
    Row(
        "dist.ProcessGroupLazy",
        "",
        NOT_OFFERED,
        "the backend is called `acc` (`lazy` names it too) and has every collective of "
        "torch.distributed, those that TorchAcc lacks as well: `docs/distributed.md`",
    ),
    Row(
        "dist.Mesh",
        "(dp_num=1, pp_num=1, tp_num=1, fsdp_num=1, sp_num=1, topology=None)",
        DIFFERS,
        "`sp` counts as a dimension",
    ),
    *(
        Row(f"dist.Mesh.get_{name}_{what}", "()")
        for name in _DIMENSIONS
        for what in ("rank", "num", "proc_group", "rank_groups")
    ),
    Row("dist.Mesh.get_sp_num", "()"),
    Row("dist.Mesh.get_stage_id", "()"),
    Row("dist.Mesh.is_first_stage", "()"),
    Row("dist.Mesh.is_last_stage", "()"),
    Row("dist.Mesh.stage_to_global", "(stage_id)"),
    Row("dist.Mesh.get_global_rank", "()"),
    Row("dist.Mesh.get_world_size", "()"),
    Row("dist.ParallelModule", "(model, config)"),
    Row("dist.ParallelModule.config", "", WORKS, "unless the model has an attribute of this name"),
    Row("dist.ParallelModule.mesh", "", WORKS, "as `config`"),
    Row("dist.ParallelModule.device"),
    Row("dist.ParallelModule.clip_grad_norm_", "(max_grad_norm)", WORKS, "returns the norm"),
    Row("dist.ParallelModule.forward_backward", "(*args, output_fn=None, **kwargs)"),
    Row(
        "dist.DataParallel",
        "(model, config)",
        WORKS,
        "gradients travel in buckets, while the backward goes on",
    ),
    Row(
        "dist.FullyShardedDataParallel",
        "(model, config)",
        WORKS,
        "torch's own, not torch_xla's; `dp` above 1 makes it a hybrid",
    ),
    Row(
        "dist.FullyShardedDataParallel.get_shard_metadata",
        "()",
        WORKS,
        "`model.model.model.get_shard_metadata()` in the documents; any of the three has it. What "
        "it says is in another form: `docs/checkpoints.md`",
    ),
    Row(
        "dist.FullyShardedDataParallel.sharded_optim_state_dict",
        "(model, optim)",
        DIFFERS,
        "`optimizer` and `shard_metadata`, of other contents",
    ),
    Row(
        "dist.FullyShardedDataParallel.full_optim_state_dict",
        "(model, optim, rank0_only=True, cpu_offload=True)",
        DIFFERS,
    ),
    Row(
        "dist.FullyShardedDataParallel.optim_state_dict_to_load",
        "(model, optim, optim_state_dict, rank0_only=True)",
        DIFFERS,
    ),
    Row("dist.SpmdFullyShardedDataParallel", "", NOT_OFFERED, _SPMD),
    Row(
        "dist.tp.Mesh",
        "",
        NOT_OFFERED,
        "`dist.tp.device_mesh(config)` is the mesh; `dist.tp.parallelize` splits layers by a plan",
    ),
    Row(
        "dist.tp.mark_sharding",
        "(tensor, mesh, partition_spec)",
        DIFFERS,
        "takes the module and the parameter's name instead of `tensor`, since a split parameter is "
        "a new object, and the config instead of `mesh`",
    ),
    Row("dist.PipelineParallel", "(model, config)"),
    Row(
        "dist.PipelineParallel.forward_backward",
        "(*args, output_fn=None, **kwargs)",
        WORKS,
        "batches have a row for each sample, and the same number of rows for each micro batch",
    ),
    Row("dist.DistributedParallel", "(model, config)"),
    Row(
        "dist.DistributedParallel.model",
        "",
        WORKS,
        "the next wrapper inside, or the model; unless the model has an attribute of this name",
    ),
    Row("dist.fsdp.split_fsdp_wrap_modules", "", NOT_OFFERED, _TRACER),
    Row("dist.fsdp.fx_auto_wrap_policy", "", NOT_OFFERED, _TRACER),
)

_FLASH = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
_CONTEXT = (
    "q, k, v, q_lens=None, k_lens=None, dropout_p=0.0, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), alibi_slopes=None, deterministic=False"
)
_LIGER = "without effect: patches nothing, the models' own operators are fused"
_AS_IT_IS = "without effect: patches nothing, `use_flash_attn` need not be given"

# --- names that a version may have or not ---------------------------------------------------------
# A row of these is what it says ("works", and its signature held against the code) where there is
# such a name. Where there is none it is "not offered", because of `why` if it would work.
_LATER = "not in this version"
TOP_IF_THERE = (
    Row(
        "mark_dynamic",
        "(x, dims, bounds)",
        DIFFERS,
        "without effect: sizes need not be announced; its arguments are checked",
    ),
    Row("accelerate_hf_trainer", "(enable=True)", why=_LATER),
    Row(
        "patch_qwen_model",
        "(model)",
        DIFFERS,
        "without effect: returns the model as it is, there is nothing to patch",
    ),
    Row(
        "send_cpu_data_to_device",
        "(datas, device, input_sharding=None)",
        DIFFERS,
        f"takes no sharding: {_SPMD}",
    ),
    Row("save", "(data, file_or_path, master_only=True, global_master=False)", why=_LATER),
)
DIST_IF_THERE = (
    Row("dist.state_dict_utils.load_checkpoints", "(ckpt_dir, ckpt_name)", why=_LATER),
    Row(
        "dist.state_dict_utils.save_checkpoints",
        "(state_dict_list, shard_metadata_list, save_paths, save_type)",
        why=_LATER,
    ),
    Row(
        "dist.state_dict_utils.consolidate_sharded_model_checkpoints",
        "(ckpt_dir, checkpoints)",
        DIFFERS,
        "writes no `layer_info.pickle`: each shard says what it holds",
    ),
    Row(
        "dist.state_dict_utils.consolidate_sharded_optimizer_checkpoints",
        "(ckpt_dir, checkpoints, layer_info)",
        DIFFERS,
        "needs no `layer_info`: each shard says what it holds",
    ),
    Row(
        "dist.state_dict_utils.reshard_model_dict",
        "(consolidate_model_dict, shard_model, layer_name_lists, reshard_num)",
        DIFFERS,
        "needs no `layer_name_lists`: the shard says what the units are",
    ),
    Row(
        "dist.state_dict_utils.reshard_optim_dict",
        "(consolidate_optim_dict, shard_optim, layer_name_lists, reshard_num)",
        DIFFERS,
        "needs no `layer_name_lists`: the shard says what the units are",
    ),
    Row(
        "dist.state_dict_utils.consolidate_and_reshard_fsdp_model_dict",
        "(ckpt_dir, model_ckpt_name_pattern, save_dir='', model_save_name_pattern='', "
        "reshard_num=1, save_model=True)",
        why=_LATER,
    ),
    Row(
        "dist.state_dict_utils.consolidate_and_reshard_fsdp_optim_dict",
        "(ckpt_dir, optimizer_ckpt_name_pattern, save_dir='', optimizer_save_name_pattern='', "
        "reshard_num=1, save_optimizer=True)",
        why=_LATER,
    ),
    Row(
        "dist.state_dict_utils.consolidate_and_reshard_fsdp_checkpoint",
        "(ckpt_dir, model_ckpt_name_pattern, optimizer_ckpt_name_pattern, save_dir='', "
        "model_save_name_pattern='', optimizer_save_name_pattern='', reshard_num=1, "
        "save_checkpoint=True)",
        why=_LATER,
    ),
)
_LIGER_PARTS = (
    "(rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, swiglu=True)"
)
OPS_IF_THERE = (
    Row("ops", "", DIFFERS),
    Row("ops.flash_attn_xla", f"(q, k, v, {_FLASH})", why=_LATER),
    Row("ops.flash_attn_varlen_xla", f"(q, k, v, attention_mask, {_FLASH})", why=_LATER),
    Row("ops.flash_attn_varlen_qkvpacked_xla", f"(qkv, attention_mask, {_FLASH})", why=_LATER),
    Row("ops.flash_attn_varlen_position_ids_xla", f"(q, k, v, position_ids, {_FLASH})", why=_LATER),
    Row(
        "ops.spmd_flash_attn_varlen_xla",
        f"(q, k, v, attention_mask, {_FLASH}, mesh=None, partition_spec=None)",
        DIFFERS,
        f"refuses `partition_spec`: {_SPMD}",
    ),
    Row(
        "ops.scaled_dot_product_attention",
        "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None)",
        why=_LATER,
    ),
    Row("ops.apply_liger_kernel", "()", DIFFERS, _LIGER),
    Row("ops.apply_liger_kernel_to_llama", _LIGER_PARTS, DIFFERS, _LIGER),
    Row("ops.apply_liger_kernel_to_qwen2", _LIGER_PARTS, DIFFERS, _LIGER),
    Row(
        "ops.context_parallel.initialize_context_parallel",
        "(context_parallel_size, intra_parallel_size=None)",
        why=_LATER,
    ),
    Row("ops.context_parallel.get_context_parallel_group", "()", why=_LATER),
    Row("ops.context_parallel.get_intra_cp_process_group", "()", why=_LATER),
    Row("ops.context_parallel.get_inter_cp_process_group", "()", why=_LATER),
    Row(
        "ops.context_parallel.ulysses",
        f"({_CONTEXT}, process_group=None, position_ids=None, rope_func=None)",
        why=_LATER,
    ),
    Row("ops.context_parallel.ring_attention", f"({_CONTEXT}, process_group=None)", why=_LATER),
    Row(
        "ops.context_parallel.context_parallel_2d",
        f"({_CONTEXT}, inter_process_group=None, intra_process_group=None)",
        why=_LATER,
    ),
    Row(
        "ops.context_parallel.split_forward_gather_backward",
        "(tensor, seq_dim, process_group, grad_scale=None)",
        why=_LATER,
    ),
    Row(
        "ops.context_parallel.gather_forward_split_backward",
        "(tensor, seq_dim, process_group, grad_scale=None)",
        why=_LATER,
    ),
)
UTILS_IF_THERE = (
    Row("utils.checkpoint.gradient_checkpoint", "(model, gc_cls)", DIFFERS),
    Row("utils.checkpoint.checkpoint_module", why=_LATER),
    Row("utils.checkpoint.fx_checkpoint", why=_TRACER),
    Row(
        "utils.cpu_offload.get_cpu_offload_context",
        "(num_offload_layers=1, num_prefetch_layers=1, num_offload_sync_layers=1.0, debug=False)",
        why=_LATER,
    ),
    Row("utils.patch.patch_amp", "()", why="`torchacc.patch()` does that"),
    Row("utils.patch.patch_autocast", "()", why="`torchacc.patch()` does that"),
    Row(
        "utils.patch.patch_fa",
        "()",
        DIFFERS,
        "without effect: patches nothing, the attention of torch runs as it is",
    ),
    Row("utils.patch.patch_llama", "(use_flash_attn)", DIFFERS, _AS_IT_IS),
    Row("utils.patch.patch_qwen", "(use_flash_attn)", DIFFERS, _AS_IT_IS),
    Row(
        "utils.decompose.replace_decompose",
        "()",
        DIFFERS,
        "without effect: replaces nothing, torch's stay",
    ),
    Row("utils.trace.trace", "(model, input_names)", why=_TRACER),
    Row("utils.utils.apply_to_tensors", why=_UTIL),
    Row("utils.utils.partition_balanced", why=_UTIL),
    Row("utils.logger", why="`logging.getLogger('TorchAcc')` is the logger"),
)

_XLA = "a setting of torch_xla"
_NOT_SET = f"{_XLA}, which is not there; no variable is set at import"
VARIABLES = (
    Option(
        "ACC_LOG_LEVEL",
        "INFO",
        WORKS,
        "debug, info, warning or error",
    ),
    Option("RANK", None),
    Option("WORLD_SIZE", None),
    Option("LOCAL_RANK", None),
    Option("MASTER_ADDR", None),
    Option("MASTER_PORT", None),
    Option(
        "USE_TORCHACC",
        "0",
        DIFFERS,
        "0 keeps `import torch` from loading the device; unset loads it unless a CUDA GPU is "
        "usable or another such device is there",
    ),
    Option("TORCHACC_PATCH_FA", "1", NOT_OFFERED, "attention is not patched"),
    Option(
        "TORCHACC_PATCH_TORCH_AUTOCAST",
        "1",
        NOT_OFFERED,
        "`torchacc.unpatch()` undoes the patch",
    ),
    Option(
        "LOW_CPU_MEM_USAGE", "0", NOT_OFFERED, "it is for torchdistx; torch has the meta device"
    ),
    Option("PJRT_LOCAL_PROCESS_RANK", None, NOT_OFFERED, _NOT_SET),
    Option("PJRT_DEVICE", "CUDA", NOT_OFFERED, _NOT_SET),
    Option("PJRT_ALLOCATOR_FRACTION", "0.95", NOT_OFFERED, _NOT_SET),
    Option("XLA_IR_SHAPE_CACHE_SIZE", "100000000", NOT_OFFERED, _NOT_SET),
    Option("XLA_COORDINATOR_PORT", "MASTER_PORT + 10", NOT_OFFERED, _NOT_SET),
    Option("USE_BOUND_FOR_SHAPE_COMPARE", "1", NOT_OFFERED, _NOT_SET),
    Option("XLA_FLAGS", None, NOT_OFFERED, _NOT_SET),
    Option("XLA_USE_SPMD", "0", NOT_OFFERED, _SPMD),
    Option("CUDA_DEVICE_MAX_CONNECTIONS", "1", NOT_OFFERED, "no variable is set at import"),
    Option(
        "XLA_PERSISTENT_CACHE_PATH",
        None,
        NOT_OFFERED,
        "`ACC_CACHE_DIR` is where kernels are kept",
    ),
    Option("TORCHACC_VERSION", None, NOT_OFFERED, "for TorchAcc's own packaging"),
    Option("TORCH_ACC_PACKAGE_NAME", None, NOT_OFFERED, "for TorchAcc's own packaging"),
    Option("TORCHACC_TRIM_GRAPH", None, NOT_OFFERED, "of ms-swift, which reads it itself"),
    Option("TORCHACC_DATA_BUCKETS", None, NOT_OFFERED, "of ms-swift: see `dataloader.buckets`"),
)

# The console command and its documented options; as `*_IF_THERE` above.
COMMAND = "consolidate_and_reshard_fsdp_ckpts"
_TOO = ", which finds `rank0-of-2-...` too, as the documents call the files"
COMMAND_OPTIONS = (
    Option("--ckpt_dir", None),
    Option(
        "--model_ckpt_name_pattern",
        "rank-*-of-*-model.pth",
        DIFFERS,
        f"the default is `rank*-of-*-model.pth`{_TOO}",
    ),
    Option(
        "--optimizer_ckpt_name_pattern",
        "rank-*-of-*-optimizer.pth",
        DIFFERS,
        f"the default is `rank*-of-*-optimizer.pth`{_TOO}",
    ),
    Option("--ckpt_type", "all"),
    Option("--reshard_num", 1),
    Option("--save_dir", ""),
    Option("--model_save_name_pattern", ""),
    Option("--optimizer_save_name_pattern", ""),
)

# Files of TorchAcc's repository, which are no part of a package.
SCRIPTS = (
    Row(
        "tools/plot_mem.py",
        "",
        NOT_OFFERED,
        "`torchacc.graph` draws the memory of a plan, and `docs/memory.md` says what else there is",
    ),
    Row(
        "benchmarks/transformer.py",
        "",
        NOT_OFFERED,
        "`python -m benchmarks.run` measures this project's own cases: `docs/performance.md`",
    ),
    Row("benchmarks/run.sh", "", NOT_OFFERED, "as `benchmarks/transformer.py`, which it runs"),
    Row(
        "benchmarks/accuracy",
        "",
        NOT_OFFERED,
        "it trains with FastChat on a GPU; what is compared here says `docs/accuracy.md`",
    ),
    Row("examples/train_olmo.ipynb", "", NOT_OFFERED, "`examples/huggingface.py` trains a GPT-2"),
)

# --- TI-ACC ---------------------------------------------------------------------------------------
_POLICY = "(policy, start_step, hold_step, end_step, interval_time, interval_hold_time)"
_ASKED = "(epoch, lr=None, loss=None, scaler=None)"
_TENSORFLOW = "for TensorFlow with parameter servers"
_WARP = "tiacc_training.torch.tiacc_torch_warp"
TIACC = (
    Row("tiacc_training.torch.distributed.init_tiacc_training", "()"),
    Row(
        f"{_WARP}.MixedPrecision_TrainingPolicy",
        _POLICY,
        WORKS,
        "in the order of the samples; the names in the table of parameters (`start_time`, "
        "`hold_time`, `end_time`) and older ones (`test_interval`, `test_step`) are taken as well. "
        "By which rules policies 1 and 2 decide is not documented: its docstring has ours",
    ),
    Row(
        f"{_WARP}.MixedPrecision_TrainingPolicy.enable_mixed_precision",
        _ASKED,
        WORKS,
        "decides once for each epoch, and for all processes alike; the scaler may be left out",
    ),
    Row(
        f"{_WARP}.IndexTFRDataset",
        "(tfrecored_dir, tfrecord_file, transform=None)",
        WORKS,
        "reads what `img2tfrecord` here has written, since the layout of TI-ACC's index is not "
        "documented",
    ),
    Row("tiacc_training.tiacc_init", "(params)"),
    Row("tiacc_training.tiacc_training", "", WORKS, "the package itself"),
    Row(
        "tiacc_training.calc.MixedPrecision_TrainingPolicy",
        "(policy, *, start_time, end_time)",
        WORKS,
        "the same class",
    ),
    Row(
        "tiacc_training.calc.get_fused_optimizer", "(optimizer)", WORKS, "the same object, changed"
    ),
    Row(
        "tiacc_training.tensorflow.get_variable",
        "",
        NOT_OFFERED,
        f"{_TENSORFLOW}: for PyTorch there is `torchacc.embedding.get_variable`",
    ),
    Row(
        "tiacc_training.tensorflow.SparseTensor",
        "",
        NOT_OFFERED,
        f"{_TENSORFLOW}: `torchacc.embedding` takes jagged tensors, or ids and offsets",
    ),
)
_LAUNCH = ("--nproc_per_node", "--nnodes", "--node_rank", "--master_addr", "--master_port")
TIACC_COMMANDS = (
    ("tiacc_training.torch.distributed.launch", _LAUNCH),
    ("tiacc_training.distributed.launch", _LAUNCH),
    (
        "tiacc_training.tools.general_image_list",
        ("--img_dir", "--img_list", "--label_str2int"),
    ),
    (
        "tiacc_training.tools.img2tfrecord",
        ("--img_dir", "--img_list", "--tfrecords_name", "--dataset_type", "--workers"),
    ),
)
