"""Write docs/configuration.md from the schema: ``python -m docs.make_configuration``.

Keys, types, defaults and meanings come from ``megappo/config/schema.py``, OpenRLHF's names
from ``megappo/config/openrlhf.py``; only what stands in neither is written here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megappo.config.keys import Key, describe, entries, keys
from megappo.config.openrlhf import RENAMED, WITHOUT
from megappo.config.ranges import RANGES

TARGET = Path(__file__).with_name("configuration.md")

INTRODUCTION = """\
# Configuration

<!-- Written by `python -m docs.make_configuration` from megappo/config/; do not edit. -->

A run is configured by YAML files and by dotted keys on the command line:

```
megappo train --config ppo.yaml --actor.adam.lr 1e-6 --data.apply_chat_template
```

`--config` may be given several times: later files win over earlier ones, and keys on the
command line win over all files, wherever they stand. In YAML the dots are nesting
(`actor: {adam: {lr: 1e-6}}`). A flag without a value is true; a pair of numbers may be given
as `--reward.clip_range -10 10` or as `--reward.clip_range "[-10, 10]"`; `null` unsets a key
that may be unset. `megappo train --help` lists every key, `--print_config` prints the whole
configuration and stops.

Unknown keys, wrong types, values out of range and combinations that cannot work are refused
in one line that names the key, before anything starts.

Three keys are required: `actor.model_name_or_path`, `data.prompt_dataset` and
`reward.remote_url` or `reward.model_name_or_path`.

The last column says where a name is known from. *OpenRLHF* means the same name with the same
meaning there (0.11); what differs there is in brackets.
"""

RULES = """\
## Rules between keys

- `megatron.world_size` is a multiple of `megatron.tensor_model_parallel_size` x
  `megatron.pipeline_model_parallel_size`; the quotient is the number of replicas.
- `megatron.expert_model_parallel_size` divides the ranks of a pipeline stage,
  `megatron.world_size` / `megatron.pipeline_model_parallel_size`: experts are spread over
  tensor ranks and replicas alike. A model with experts needs `megatron.sequence_parallel` where
  its tensor-parallel size is above 1.
- Layers go to pipeline stages, and to their `megatron.virtual_pipeline_model_parallel_size`
  chunks, as evenly as they can; the first ones take what is left over.
- Engines inside the mesh's ranks fill them: `vllm.num_engines` x `vllm.tensor_parallel_size` =
  `megatron.world_size`. With `train.colocate_all: false` both are free of the mesh, and the run
  needs `vllm.num_engines` x `vllm.tensor_parallel_size` processes (on CUDA: GPUs) more.
- `train.batch_size` divides `rollout.batch_size` x `rollout.n_samples_per_prompt`.
- `rollout.max_new_tokens` < `data.max_len` <= `train.max_tokens_per_gpu`.
- `megatron.sequence_parallel` needs a tensor-parallel size above 1.
- `megatron.fp8_recipe` and `megatron.first_last_layers_bf16` need `megatron.fp8`, and
  `megatron.num_layers_at_start_in_bf16` and `..._at_end_in_bf16` need
  `megatron.first_last_layers_bf16`, which the recipe `delayed` does not have. Without CUDA and
  TransformerEngine FP8 is emulated ([precision.md](precision.md)): there is no `mxfp8` then, and
  no `delayed` with `megatron.recompute_granularity: full`.
- The estimators `rloo` and `group_norm` need at least 2 samples per prompt.
- `algo.kl.target` needs `algo.kl.init_coef` above 0.
- `eval.steps` needs `eval.dataset`.
- `data.input_template` has one `{}`, and is not used together with `data.apply_chat_template`.
"""

# Names from elsewhere than OpenRLHF, and names of megappo's own.
ORIGINS = {
    "rollout.top_k": "vLLM `top_k`",
    "vllm.kv_cache_memory_bytes": "vLLM `kv_cache_memory_bytes`",
    "vllm.max_num_seqs": "vLLM `max_num_seqs`",
    "vllm.verify_weights": "own",
    "train.max_steps": "own",
    "data.overlong_prompts": "own",
    "data.invalid_rows": "own",
    "logger.console": "own",
    "logger.wandb.mode": "W&B `mode`",
    "megatron.world_size": "Megatron `world_size`",
    "megatron.tensor_model_parallel_size": "Megatron `--tensor-model-parallel-size`",
    "megatron.pipeline_model_parallel_size": "Megatron `--pipeline-model-parallel-size`",
    "megatron.virtual_pipeline_model_parallel_size": (
        "Megatron `virtual_pipeline_model_parallel_size` (`--num-virtual-stages-per-pipeline-rank`)"
    ),
    "megatron.expert_model_parallel_size": "Megatron `--expert-model-parallel-size`",
    "megatron.sequence_parallel": "Megatron `--sequence-parallel`",
    "megatron.params_dtype": "Megatron `params_dtype` (`--bf16`)",
    "megatron.use_distributed_optimizer": "Megatron `--use-distributed-optimizer`",
    "megatron.recompute_granularity": "Megatron `--recompute-granularity`",
    "megatron.fp8": "Megatron `fp8` (`--fp8-format`)",
    "megatron.fp8_recipe": "Megatron `--fp8-recipe` (there default delayed)",
    "megatron.first_last_layers_bf16": "Megatron `--first-last-layers-bf16`",
    "megatron.num_layers_at_start_in_bf16": "Megatron `--num-layers-at-start-in-bf16`",
    "megatron.num_layers_at_end_in_bf16": "Megatron `--num-layers-at-end-in-bf16`",
    "ray.num_cpus_per_rank": "own",
    "ray.num_gpus_per_rank": "own",
    "ray.placement_timeout": "own",
    "ray_address": "Ray `address`",
    "output_dir": "own",
}

# Same name as in OpenRLHF, but another default or wider values there.
DIFFERENCES = {
    "actor.model_name_or_path": "also a hub's model name",
    "critic.model_name_or_path": "also a hub's model name",
    "reward.remote_url": "also a service's URL, and a function of queries, prompts, labels",
    "data.prompt_dataset": "also a hub's data set, or several",
    "eval.dataset": "also a hub's data set",
    "rollout.max_new_tokens": "default null: what the prompt leaves of data.max_len",
    "vllm.enable_prefix_caching": "default false",
    "vllm.enforce_eager": "default false",
    "train.colocate_all": "default false",
    "data.max_samples": "default 100000000",
    "eval.temperature": "default 0.6",
    "eval.n_samples_per_prompt": "default 4",
    "ckpt.path": "default ./ckpt/checkpoints_ppo_ray",
    "logger.wandb.project": "default openrlhf_train_ppo",
    "logger.wandb.run_name": "default ppo_ and the date",
}


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    columns = list(header)
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def _value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "`null`", True: "`true`", False: "`false`"}[value]
    if value == "":
        return "(required)"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _values(key: Key) -> str:
    kind = describe(key.type)
    return f"{kind}, {RANGES[key.name].expected}" if key.name in RANGES else kind


def _origin(name: str) -> str:
    text = ORIGINS.get(name, "OpenRLHF")
    if name in DIFFERENCES:
        text += f" (there {DIFFERENCES[name]})"
    others = [f"`{theirs}`" for theirs, (ours, _) in RENAMED.items() if ours == name]
    return f"{text}; OpenRLHF {', '.join(others)}" if others else text


def render() -> str:
    """The whole page."""
    sections: dict[str, list[Key]] = {}
    titles = {"": "## Run"}
    for entry in entries():
        group = entry.name.split(".")[0] if "." in entry.name else ""
        if isinstance(entry, Key):
            sections.setdefault(group, []).append(entry)
        elif not group:
            titles[entry.name] = f"## {entry.name}"
    lines = [INTRODUCTION]
    for group in (*(name for name in titles if name), ""):
        rows = [
            [f"`{key.name}`", _value(key.default), _values(key), key.doc, _origin(key.name)]
            for key in sections[group]
        ]
        lines += [titles[group], ""]
        lines += [*_table(("key", "default", "value", "meaning", "known from"), rows), ""]
    lines += [RULES, "## Coming from OpenRLHF", ""]
    same = len(keys()) - len(ORIGINS)
    lines += [f"{same} keys have the same name. These have another:", ""]
    renamed = [[f"`{a}`", f"`{b}`", change] for a, (b, change) in RENAMED.items()]
    lines += [*_table(("OpenRLHF", "megappo", "value"), renamed), ""]
    lines += ["These have no equal:", ""]
    lines += [*_table(("OpenRLHF", "why"), ([f"`{a}`", why] for a, why in WITHOUT.items())), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
