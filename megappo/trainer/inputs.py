"""What a run reads before any model loads: prompts, reward function, model shapes.

``load_inputs`` finds every fault of these here, in the driver, so that a run that cannot
work ends before a rank starts. It is remembered for the last configuration, since both the
runtime's settings and the trainer need it.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from pathlib import Path

from megappo.config.checks import check, reward_folders
from megappo.config.schema import Config
from megappo.data.prompts import PromptDataset
from megappo.data.stream import PromptStream
from megappo.data.tokenizer import load_tokenizer, stop_token_ids
from megappo.mesh.reading import RewardReader
from megappo.records import SamplingParams, ScoreText
from megappo.rewards.function import load_reward_function
from megappo.rewards.protocol import RewardFunction
from megappo.trainer.model_checks import check_models
from megappo.weights.families import load_shape
from megappo.weights.hf_files import read_config
from megappo.weights.shape import ModelShape

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunInputs:
    """What the configuration names, loaded and checked.

    ``eval_prompts`` is None without ``eval.dataset``. ``critic`` is the shape of the folder
    that the critic starts from (the policy's, unless it has its own), None without a critic.
    ``reward`` is None, or ``reward_models`` are none, where the configuration names none.
    """

    stop_token_ids: tuple[int, ...]
    prompts: PromptDataset
    eval_prompts: PromptDataset | None
    reward: RewardFunction | None
    policy: ModelShape
    critic: ModelShape | None
    reward_models: tuple[ModelShape, ...]

    def sampling(self, args: Config) -> SamplingParams:
        """How training rollouts are drawn."""
        return SamplingParams(
            args.rollout.temperature, args.rollout.max_new_tokens, self.stop_token_ids
        )

    def eval_sampling(self, args: Config) -> SamplingParams:
        """How evaluation responses are drawn."""
        return SamplingParams(
            args.eval.temperature, args.rollout.max_new_tokens, self.stop_token_ids
        )

    def stream(
        self, args: Config, *, consumed: int = 0, max_steps_per_episode: int | None = None
    ) -> PromptStream:
        """The prompts of the run from position ``consumed`` on."""
        return PromptStream(
            self.prompts,
            batch_size=args.rollout.batch_size,
            num_episodes=args.train.num_episodes,
            seed=args.train.seed,
            consumed=consumed,
            max_steps_per_episode=max_steps_per_episode,
        )


@functools.lru_cache(maxsize=1)
def load_inputs(args: Config) -> RunInputs:
    """Load and check everything that needs no rank.

    Raises:
        ValueError: with one line that names the key or the file and line at fault.
    """
    check(args)
    policy = load_shape(args.actor.model_name_or_path)
    critic = load_shape(critic_folder(args)) if needs_critic(args) else None
    folders = reward_folders(args.reward.model_name_or_path)
    reward_models = tuple(load_shape(folder) for folder in folders)
    check_models(args, policy, critic, reward_models)
    for folder in (args.actor.model_name_or_path, *folders):
        _note_dropout(Path(folder))
    tokenizer = load_tokenizer(args.actor.model_name_or_path)
    max_prompt_len = args.data.max_len - args.rollout.max_new_tokens
    stop_ids = stop_token_ids(args.actor.model_name_or_path, tokenizer)
    if beyond := [token for token in stop_ids if token >= policy.vocab_size]:
        raise ValueError(
            f"actor.model_name_or_path = {args.actor.model_name_or_path}: eos_token_id {beyond[0]} "
            f"is not in the vocabulary of {policy.vocab_size} (vocab_size in config.json)"
        )
    prompts = PromptDataset(
        args.data.prompt_dataset,
        args.data,
        tokenizer,
        max_prompt_len=max_prompt_len,
        vocab_size=policy.vocab_size,
    )
    eval_prompts = None
    if args.eval.dataset is not None:
        eval_prompts = PromptDataset(
            args.eval.dataset,
            args.data,
            tokenizer,
            max_prompt_len=max_prompt_len,
            vocab_size=policy.vocab_size,
            key="eval.dataset",
        )
    for folder, shape in zip(folders, reward_models, strict=True):
        _try_reading(folder, shape, prompts)
    function = args.reward.remote_url
    return RunInputs(
        stop_token_ids=stop_ids,
        prompts=prompts,
        eval_prompts=eval_prompts,
        reward=None if function is None else load_reward_function(function),
        policy=policy,
        critic=critic,
        reward_models=reward_models,
    )


def _note_dropout(folder: Path) -> None:
    """Say that a model's dropout is off: with it, no ratio would be 1 before the first update."""
    for key in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"):
        if rate := read_config(folder).get(key):
            logger.warning("%s: %s = %s is taken for 0 in training", folder, key, rate)


def _try_reading(folder: str, shape: ModelShape, prompts: PromptDataset) -> None:
    """Have a reward model's tokenizer read the first prompt, to find now what is wrong with it."""
    prompt = prompts[0]
    read = RewardReader(
        folder,
        vocab_size=shape.vocab_size,
        max_len=shape.max_position_embeddings,
        chat=prompt.messages is not None,
    )
    read([ScoreText(prompt.text, prompt.messages, "", True)])


def needs_critic(args: Config) -> bool:
    """Whether the estimator uses values."""
    return args.algo.advantage.estimator == "gae"


def needs_reference(args: Config) -> bool:
    """Whether the token rewards hold a KL penalty."""
    return args.algo.kl.init_coef > 0


def needs_reward_model(args: Config) -> bool:
    """Whether a model on the mesh gives rewards."""
    return args.reward.model_name_or_path is not None


def critic_folder(args: Config) -> Path:
    """The Hugging Face folder that the critic starts from."""
    return Path(args.critic.model_name_or_path or args.actor.model_name_or_path)


def total_steps(args: Config) -> int:
    """PPO steps of the whole run, resumed parts included."""
    stream = load_inputs(args).stream(args)
    if args.train.max_steps is None:
        return stream.num_steps
    return min(stream.num_steps, args.train.max_steps)
