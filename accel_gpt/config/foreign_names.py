"""Map the option names of other trainers to keys of this package.

The error for an unknown key uses these tables. docs/how-to/from-nanogpt.md shows the tables of
nanoGPT and llm.c, and docs/how-to/from-hf-trainer.md the most used names of the Trainer.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

# A value is a key, or a sentence that says what to do. Tests check that the keys in both exist.

NANOGPT: Mapping[str, str] = MappingProxyType(
    {
        "always_save_checkpoint": "for False, set checkpoint.every to 0: only the best and the "
        "last checkpoint are saved",
        "backend": "no key is needed: Accelerate uses nccl on GPUs and gloo on CPUs",
        "batch_size": "train.micro_batch_size",
        "beta1": "optim.beta1",
        "beta2": "optim.beta2",
        "bias": "model.bias",
        "block_size": "model.block_size",
        "compile": "train.compile",
        "dataset": "data.train",
        "decay_lr": "for False, set schedule.name to constant",
        "device": "the launcher chooses the device; for the CPU, set ACCELERATE_USE_CPU=true in "
        "the environment",
        "dropout": "model.dropout",
        "dtype": "train.mixed_precision",
        "eval_interval": "eval.every",
        "eval_iters": "set eval.tokens, the number of evaluated tokens: eval_iters x batch_size x "
        "block_size",
        "eval_only": "use accel-gpt evaluate RUN; for pretrained weights, accel-gpt evaluate gpt2 "
        "--data FOLDER",
        "grad_clip": "optim.grad_clip",
        "gradient_accumulation_steps": "set train.tokens_per_step, the tokens of one optimizer "
        "step over all processes; the accumulation follows from it",
        "init_from": "set model.init_from; to resume, launch the same command again",
        "learning_rate": "optim.lr",
        "log_interval": "log.every",
        "lr_decay_iters": "set schedule.decay_steps; it counts from the end of the warm-up",
        "max_iters": "train.max_steps",
        "min_lr": "schedule.min_lr",
        "n_embd": "model.n_embd",
        "n_head": "model.n_head",
        "n_layer": "model.n_layer",
        "out_dir": "out_dir",
        "wandb_log": "set log.trackers to wandb",
        "wandb_project": "set log.trackers to wandb; the project is always accel_gpt",
        "wandb_run_name": "set log.trackers to wandb; the run's name begins with the last part of "
        "out_dir",
        "warmup_iters": "schedule.warmup_steps",
        "weight_decay": "optim.weight_decay",
    }
)

VAL_BATCHES = "set eval.tokens, the number of evaluated tokens: batches x batch size x length"
DATA_FILES = "to the folder that holds the .bin files"

# Options of train_gpt2.cu, then options of train_gpt2.py
LLM_C: Mapping[str, str] = MappingProxyType(
    {
        "-b": "train.micro_batch_size",
        "-c": "optim.weight_decay",
        "-d": "train.tokens_per_step",
        "-e": "set model.preset for a new model, model.init_from for existing weights",
        "-f": "train.matmul_precision",
        "-g": "sample.max_new_tokens",
        "-i": f"set data.train {DATA_FILES}",
        "-j": f"set data.val {DATA_FILES}",
        "-k": "schedule.name",
        "-l": "optim.lr",
        "-m": VAL_BATCHES,
        "-n": "checkpoint.every",
        "-nk": "checkpoint.keep_last",
        "-o": "out_dir",
        "-q": "set schedule.min_lr: learning rate x final fraction",
        "-r": "set train.activation_checkpointing to blocks",
        "-s": "sample.every",
        "-sl": "set train.spike_sigma, and train.skip_spikes to true",
        "-t": "model.block_size",
        "-u": "schedule.warmup_steps",
        "-v": "eval.every",
        "-x": "train.max_steps",
        "-y": "no option is needed: launch the same command again to resume",
        "-z": "set FSDP in the accelerate config, as configs/accelerate/fsdp2_8.yaml does",
        "batch_size": "train.micro_batch_size",
        "compile": "train.compile",
        "device": NANOGPT["device"],
        "dtype": "train.mixed_precision",
        "flash": "no key is needed: attention always runs PyTorch's fused kernels",
        "grad_clip": "optim.grad_clip",
        "inference_only": "generate with accel-gpt sample RUN",
        "input_bin": f"set data.train {DATA_FILES}",
        "input_val_bin": f"set data.val {DATA_FILES}",
        "learning_rate": "optim.lr",
        "learning_rate_decay_frac": "set schedule.min_lr: learning_rate x learning_rate_decay_frac",
        "model": "set model.preset for a new model, model.init_from for existing weights",
        "num_iterations": "train.max_steps",
        "output_dir": "out_dir",
        "overfit_single_batch": "to try a config in a few steps, run "
        "accel-gpt verify-resume CONFIG --steps 4 --kills 1",
        "recompute": "set train.activation_checkpointing to blocks",
        "sample_every": "sample.every",
        "sequence_length": "model.block_size",
        "tensorcores": "train.matmul_precision",
        "total_batch_size": "train.tokens_per_step",
        "val_loss_every": "eval.every",
        "val_max_steps": VAL_BATCHES,
        "warmup_iters": "schedule.warmup_steps",
        "weight_decay": "optim.weight_decay",
        "zero_stage": "set FSDP in the accelerate config, as configs/accelerate/fsdp2_8.yaml does",
    }
)

EPOCHS = (
    "set train.max_tokens to the number of epochs x the number of train tokens; the first lines of "
    "a run print the train tokens"
)
EVALUATION = "set eval.every, the steps between evaluations; 0 evaluates only at the end"
SAVING = "set checkpoint.every, the steps between checkpoints; 0 saves only at the end"
FSDP = "set FSDP in the accelerate config, as configs/accelerate/fsdp2_8.yaml does"
DDP = "no key is needed: the training loop sets up DDP itself"
LIGER = "Liger kernels are not supported; train.compile fuses kernels"
LOADER = "no key is needed: token shards are memory-mapped and read ahead"
INDUCTOR = "train.compile always uses the inductor backend; set it to graphs for CUDA graphs"
BEST = "checkpoint.keep_best keeps the checkpoint with the lowest val loss"
NO_METRICS = "no key is needed: evaluation measures only the loss and values derived from it"
UPLOAD = "set hub.push to end or every_checkpoint"
OPTIMIZER = "set optim.name to adamw or muon"
PRETRAINED = "set model.init_from to the Hub id or folder"
NEW_SHAPE = "set model.preset and the other keys of model, such as model.n_layer"
OWN_TEXT = "set data.text to your own file or folder of text"
HUB_TEXT = "set data.prepare.source to dataset and data.prepare.dataset to the Hub id"
SIZE_LIMIT = "to train on less text, set train.max_steps or train.max_tokens"
ONE_LENGTH = "no key is needed: all sequences have model.block_size tokens"
TRACKIO = "set log.trackers to trackio, and TRACKIO_SPACE_ID=user/space in the environment"
UNUSED = "no key is needed: the option has no use in pretraining a GPT"

HF_TRAINER: Mapping[str, str] = MappingProxyType(
    {
        "accelerator_config": "set these in the accelerate config or as keys of train",
        "activation_checkpointing": "set train.activation_checkpointing to blocks",
        "activation_checkpointing_kwargs": "set train.activation_checkpointing to blocks",
        "adafactor": OPTIMIZER,
        "adam_beta1": "optim.beta1",
        "adam_beta2": "optim.beta2",
        "adam_epsilon": "optim.eps",
        "attn_implementation": "no key is needed: attention always runs PyTorch's fused kernels",
        "auto_find_batch_size": "set train.micro_batch_size to auto",
        "average_tokens_across_devices": "no key is needed: the loss is always the mean over all "
        "tokens of all processes",
        "batch_eval_metrics": NO_METRICS,
        "bf16": "set train.mixed_precision to bf16",
        "bf16_full_eval": "evaluation runs in the precision of train.mixed_precision",
        "block_size": "model.block_size",
        "cache_dir": "set HF_HOME in the environment; data.cache_dir caches the shards of a URL",
        "config_name": NEW_SHAPE,
        "config_overrides": NEW_SHAPE,
        "data_seed": "set seed; it also seeds the order of the data",
        "dataloader_drop_last": LOADER,
        "dataloader_in_order": LOADER,
        "dataloader_multiprocessing_context": LOADER,
        "dataloader_num_workers": LOADER,
        "dataloader_persistent_workers": LOADER,
        "dataloader_pin_memory": LOADER,
        "dataloader_prefetch_factor": LOADER,
        "dataset_config_name": "data.prepare.dataset_config",
        "dataset_name": HUB_TEXT,
        "ddp_backend": NANOGPT["backend"],
        "ddp_broadcast_buffers": DDP,
        "ddp_bucket_cap_mb": DDP,
        "ddp_find_unused_parameters": DDP,
        "ddp_static_graph": DDP,
        "ddp_timeout": "train.step_timeout",
        "debug": UNUSED,
        "deepspeed": "DeepSpeed is not supported; " + FSDP,
        "disable_tqdm": "set log.level to warning to print only warnings and errors",
        "do_eval": EVALUATION,
        "do_predict": "generate with accel-gpt sample RUN",
        "do_train": "to evaluate without training, use accel-gpt evaluate RUN",
        "dtype": "train.mixed_precision",
        "enable_jit_checkpoint": "no key is needed: a signal such as SIGTERM always saves a "
        "checkpoint first",
        "eval_accumulation_steps": "no key is needed: evaluation keeps no logits",
        "eval_delay": EVALUATION,
        "eval_do_concat_batches": NO_METRICS,
        "eval_on_start": "to evaluate a model before training, run accel-gpt evaluate",
        "eval_steps": "eval.every",
        "eval_strategy": EVALUATION,
        "eval_use_gather_object": NO_METRICS,
        "evaluation_strategy": EVALUATION,
        "fp16": "set train.mixed_precision to fp16",
        "fp16_full_eval": "evaluation runs in the precision of train.mixed_precision",
        "fsdp": FSDP,
        "fsdp_config": FSDP,
        "full_determinism": "train.reproducible",
        "gradient_accumulation_steps": NANOGPT["gradient_accumulation_steps"],
        "gradient_checkpointing": "set train.activation_checkpointing to blocks",
        "gradient_checkpointing_kwargs": "set train.activation_checkpointing to blocks",
        "greater_is_better": BEST,
        "group_by_length": ONE_LENGTH,
        "half_precision_backend": "train.mixed_precision",
        "hub_always_push": UPLOAD,
        "hub_model_id": "hub.repo_id",
        "hub_private_repo": "hub.private",
        "hub_revision": "uploads always go to the main branch, with a tag for each step",
        "hub_strategy": UPLOAD,
        "hub_token": "log in with hf auth login, or set HF_TOKEN in the environment",
        "ignore_data_skip": "no key is needed: a resumed run finds its position in the data at "
        "once",
        "include_for_metrics": NO_METRICS,
        "include_num_input_tokens_seen": "no key is needed: metrics always hold the tokens",
        "include_tokens_per_second": "no key is needed: metrics always hold tokens per second",
        "keep_linebreaks": "no key is needed: line breaks are kept",
        "label_names": UNUSED,
        "label_smoothing_factor": "label smoothing is not supported; leave it out",
        "learning_rate": "optim.lr",
        "length_column_name": ONE_LENGTH,
        "liger_kernel_config": LIGER,
        "load_best_model_at_end": BEST + "; export it with accel-gpt export RUN --checkpoint best",
        "local_rank": "the launcher sets it: start with accelerate launch or torchrun",
        "log_level": "log.level",
        "log_level_replica": "no key is needed: only rank 0 prints",
        "log_on_each_node": "no key is needed: only rank 0 prints",
        "logging_dir": "no key is needed: TensorBoard files are in the folder tensorboard of "
        "out_dir",
        "logging_first_step": "no key is needed: the first step is always logged",
        "logging_nan_inf_filter": "no key is needed: a step that is not finite is skipped and "
        "counted",
        "logging_steps": "log.every",
        "logging_strategy": "set log.every, the steps between logged metrics",
        "low_cpu_mem_usage": "no key is needed: under FSDP no process holds the whole model",
        "lr_scheduler_kwargs": "set schedule.min_lr and schedule.decay_steps",
        "lr_scheduler_type": "set schedule.name to cosine, wsd, linear or constant",
        "max_eval_samples": "set eval.tokens, the number of evaluated tokens",
        "max_grad_norm": "optim.grad_clip",
        "max_seq_length": "model.block_size",
        "max_steps": "train.max_steps",
        "max_train_samples": SIZE_LIMIT,
        "metric_for_best_model": BEST,
        "model_name_or_path": PRETRAINED,
        "model_revision": "write the revision after the id: model.init_from user/name@revision",
        "model_type": NEW_SHAPE,
        "neftune_noise_alpha": "NEFTune is not supported; leave it out",
        "no_cuda": NANOGPT["device"],
        "num_train_epochs": EPOCHS,
        "optim": OPTIMIZER,
        "optim_args": "set the keys of optim, such as optim.muon_momentum",
        "optim_target_modules": OPTIMIZER,
        "output_dir": "out_dir",
        "overwrite_output_dir": "set another out_dir, or remove the folder; a launch resumes the "
        "run in out_dir",
        "parallelism_config": FSDP,
        "per_device_eval_batch_size": "no key is needed: evaluation uses train.micro_batch_size",
        "per_device_train_batch_size": "train.micro_batch_size",
        "per_gpu_train_batch_size": "train.micro_batch_size",
        "prediction_loss_only": NO_METRICS,
        "preprocessing_num_workers": "data.prepare.workers",
        "project": NANOGPT["wandb_project"],
        "push_to_hub": UPLOAD + " and hub.repo_id to user/name",
        "push_to_hub_model_id": "hub.repo_id",
        "remove_unused_columns": "no key is needed: only data.prepare.text_field is read",
        "report_to": "log.trackers",
        "restore_callback_states_from_checkpoint": "no key is needed: a checkpoint holds the whole "
        "state of the run",
        "resume_from_checkpoint": "launch the same command again to resume; for the checkpoint of "
        "another folder, set checkpoint.resume",
        "run_name": NANOGPT["wandb_run_name"],
        "save_on_each_node": "no key is needed: out_dir is a folder that all nodes share",
        "save_only_model": "no key is needed: checkpoints are complete; accel-gpt export RUN "
        "exports only the model",
        "save_safetensors": "no key is needed: weights are always saved as safetensors",
        "save_steps": "checkpoint.every",
        "save_strategy": SAVING,
        "save_total_limit": "checkpoint.keep_last",
        "seed": "seed",
        "skip_memory_metrics": "no key is needed: perf/memory_gb is always logged",
        "streaming": "set data.prepare.source to dataset to stream from the Hub",
        "tf32": "set train.matmul_precision to high for TF32, or to highest for float32",
        "token": "log in with hf auth login, or set HF_TOKEN in the environment",
        "tokenizer_name": "data.prepare.tokenizer",
        "torch_compile": "train.compile",
        "torch_compile_backend": INDUCTOR,
        "torch_compile_mode": INDUCTOR,
        "torch_dtype": "train.mixed_precision",
        "torch_empty_cache_steps": UNUSED,
        "trackio_bucket_id": TRACKIO,
        "trackio_space_id": TRACKIO,
        "trackio_static_space_id": TRACKIO,
        "train_file": OWN_TEXT,
        "train_sampling_strategy": "data.shuffle",
        "trust_remote_code": "code from the Hub is never run; set model.init_from to a model "
        "that needs none",
        "use_cache": "no key is needed: training keeps no key-value cache",
        "use_cpu": NANOGPT["device"],
        "use_fast_tokenizer": "no key is needed: fast tokenizers are always used",
        "use_liger_kernel": LIGER,
        "validation_file": "prepare it with accel-gpt prepare, and set data.val to its folder; "
        "by default data.prepare.val_fraction holds out a share of the text",
        "validation_split_percentage": "set data.prepare.val_fraction, a share from 0 to 1",
        "warmup_ratio": "set schedule.warmup_steps: warmup_ratio x the number of steps",
        "warmup_steps": "schedule.warmup_steps",
        "weight_decay": "optim.weight_decay",
    }
)

LAUNCHER = "set --num_processes and --num_machines of accelerate launch"

# Options of `litgpt pretrain`, and fields of its `Config`, that no table above has. A dotted name
# comes before its last part.
LITGPT: Mapping[str, str] = MappingProxyType(
    {
        "betas": "set optim.beta1 and optim.beta2",
        "data.class_path": OWN_TEXT,
        "data_path": OWN_TEXT,
        "devices": LAUNCHER,
        "eval.evaluate_example": UNUSED,
        "eval.final_validation": "no key is needed: the last step is always evaluated",
        "eval.initial_validation": HF_TRAINER["eval_on_start"],
        "eval.interval": "eval.every",
        "eval.max_iters": VAL_BATCHES,
        "global_batch_size": "set train.tokens_per_step: global_batch_size x model.block_size",
        "head_size": "model.head_dim",
        "initial_checkpoint_dir": "model.init_from",
        "log.group": "set WANDB_RUN_GROUP in the environment",
        "logger_name": "log.trackers",
        "lr_warmup_fraction": "set schedule.warmup_steps, the number of steps of the warm-up",
        "lr_warmup_steps": "schedule.warmup_steps",
        "max_norm": "optim.grad_clip",
        "max_time": "train.time_limit",
        "mlp_class_name": "set model.preset, or model.mlp",
        "model_config": NEW_SHAPE,
        "model_name": NEW_SHAPE,
        "n_query_groups": "model.n_kv_head",
        "norm_class_name": "set model.preset",
        "num_nodes": LAUNCHER,
        "num_workers": LOADER,
        "optimizer.class_path": OPTIMIZER,
        "padded_vocab_size": "no key is needed: the vocabulary is padded to a multiple of 64 in "
        "the weights",
        "parallel_residual": "parallel residual blocks are not supported; leave it out",
        "resume": HF_TRAINER["resume_from_checkpoint"],
        "rope_base": "model.rope_theta",
        "rotary_percentage": "RoPE always turns the whole head; leave it out",
        "save_interval": "checkpoint.every",
        "tokenizer_dir": "data.prepare.tokenizer",
        "train_data_path": "data.text",
        "val_data_path": HF_TRAINER["validation_file"],
        "val_split_fraction": "data.prepare.val_fraction",
    }
)

# Fields of a config.json of transformers
HF_MODEL: Mapping[str, str] = MappingProxyType(
    {
        "activation_function": "model.mlp",
        "attention_bias": "model.bias",
        "attention_dropout": "model.dropout",
        "attn_pdrop": "model.dropout",
        "embd_pdrop": "model.dropout",
        "hidden_act": "model.mlp",
        "hidden_size": "model.n_embd",
        "intermediate_size": "model.mlp_hidden",
        "layer_norm_epsilon": "model.norm_eps",
        "max_position_embeddings": "model.block_size",
        "n_ctx": "model.block_size",
        "n_inner": "model.mlp_hidden",
        "n_positions": "model.block_size",
        "num_attention_heads": "model.n_head",
        "num_hidden_layers": "model.n_layer",
        "num_key_value_heads": "model.n_kv_head",
        "resid_pdrop": "model.dropout",
    }
)

# Options of nanochat and torchtitan, and words that users try, that no other table has
WORDS: Mapping[str, str] = MappingProxyType(
    {
        "accelerator": "no key is needed: Accelerate finds the device",
        "accumulate_grad_batches": NANOGPT["gradient_accumulation_steps"],
        "batch": "train.micro_batch_size",
        "clip": "optim.grad_clip",
        "compute_environment": "give a config of accelerate to accelerate launch, as --config_file",
        "context_length": "model.block_size",
        "d_model": "model.n_embd",
        "gpus": LAUNCHER,
        "grad_accum": NANOGPT["gradient_accumulation_steps"],
        "gradient_clip_val": "optim.grad_clip",
        "iters": "train.max_steps",
        "local_batch_size": "train.micro_batch_size",
        "log_freq": "log.every",
        "matrix_lr": "set optim.name to muon, and optim.muon_lr",
        "nproc_per_node": LAUNCHER,
        "out": "out_dir",
        "output": "out_dir",
        "num_gpus": LAUNCHER,
        "num_processes": LAUNCHER,
        "run": NANOGPT["wandb_run_name"],
        "save_every": "checkpoint.every",
        "seq_len": "model.block_size",
        "steps": "train.max_steps",
        "strategy": "set it in the launcher, such as accelerate launch --use_fsdp",
        "unembedding_lr": "optim.head_lr",
    }
)

# Words that users try as the name of a section, or as a key outside a section
SECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "checkpointing": "checkpoint",
        "dataloader": "data",
        "epochs": EPOCHS,
        "evaluation": "eval",
        "gpt": "model",
        "logging": "log",
        "lr_scheduler": "schedule",
        "num_epochs": EPOCHS,
        "optimizer": "optim",
        "precision": "train.mixed_precision",
        "sampling": "sample",
        "scheduler": "schedule",
        "trainer": "train",
        "training": "train",
        "training_args": "train",
        "validation": "eval",
    }
)

FOREIGN_NAMES: Mapping[str, str] = MappingProxyType(
    {**SECTIONS, **WORDS, **HF_MODEL, **LITGPT, **HF_TRAINER, **LLM_C, **NANOGPT}
)

# Words that users try as an option of a command -> options of ours; a command advises those that
# it has.
COMMAND_OPTIONS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "checkpoint_dir": ("run",),
        "ckpt": ("checkpoint",),
        "ckpt_path": ("run",),
        "column": ("text_field",),
        "cost": ("price",),
        "dest": ("out", "to", "repo"),
        "devices": ("gpus", "processes"),
        "do_sample": ("temperature",),
        "eval_iters": ("tokens",),
        "force": ("overwrite",),
        "format": ("gguf", "source"),
        "gpu_memory": ("memory_gb",),
        "gpus": ("processes",),
        "greedy": ("temperature",),
        "hub_model_id": ("repo",),
        "init_from": ("run",),
        "input": ("path",),
        "iters": ("steps",),
        "jobs": ("workers",),
        "length": ("max_new_tokens",),
        "limit": ("tasks_limit", "hellaswag_limit"),
        "logdir": ("run",),
        "max_length": ("max_new_tokens",),
        "max_samples": ("tokens",),
        "model": ("run",),
        "model_name_or_path": ("run",),
        "n": ("num", "steps"),
        "nproc_per_node": ("gpus", "processes"),
        "num_gpus": ("gpus", "processes"),
        "num_proc": ("workers",),
        "num_processes": ("gpus", "processes"),
        "out": ("to",),
        "out_dir": ("out", "to", "run"),
        "output": ("out", "to"),
        "output_dir": ("out", "to"),
        "output_path": ("out", "to"),
        "outtype": ("dtype",),
        "precision": ("dtype",),
        "procs": ("processes",),
        "run": ("path",),
        "shard_size": ("shard_tokens",),
        "start": ("prompt",),
        "step": ("checkpoint", "steps"),
        "test_size": ("val_fraction",),
        "text_column": ("text_field",),
        "text_key": ("text_field",),
        "to": ("out", "repo"),
        "tps": ("tokens_per_second",),
        "val_split": ("val_fraction",),
    }
)
