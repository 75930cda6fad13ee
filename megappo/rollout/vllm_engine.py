"""A vLLM engine rank inside a mesh rank: draws responses, takes new weights.

The default process group of all mesh ranks is up before an engine starts; vLLM's external
launcher splits it into engines of ``tensor_parallel_size`` neighbouring ranks. Every rank of
an engine makes the same calls in the same order. The class knows no trainer and no weights
plan, so it may as well live in processes of its own.

Weights have versions. Between ``begin_update`` and a successful ``finish_update``, and after
a failure in between, the engine refuses to draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from megappo.data.tokenizer import load_tokenizer
from megappo.records import (
    FinishReason,
    GenerateRequest,
    Rollouts,
    SampleInfo,
    SampleRequest,
    SamplingParams,
)
from megappo.rollout.engine import (
    EngineSettings,
    EngineUnusableError,
    FinishedSample,
    draw,
    pack,
    response_ids,
)
from megappo.rollout.process import (
    import_vllm,
    launched_as,
    private_shared_memory,
    register_architectures,
    unchanged_random_state,
)
from megappo.rollout.update import WeightUpdate
from megappo.weights.hf_files import read_config

if TYPE_CHECKING:
    from vllm.logprobs import SampleLogprobs
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams as VLLMSamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

_FINISH_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}


class VLLMEngine:
    """One rank of one engine.

    Attributes:
        settings: how it was built.
        version: of the weights; 0 is what ``settings.model_dir`` holds.
        leader_rank: first rank of this engine in the default process group. All ranks of an
            engine draw the same tokens; the leader's are the ones to keep.
    """

    def __init__(self, settings: EngineSettings) -> None:
        """Load ``settings.model_dir``; collective over the default process group.

        Args:
            settings: the same on all ranks.

        Raises:
            ValueError: the ranks cannot be split into engines, the context or the KV cache does
                not fit, or the model has a layer that cannot be updated.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        size = settings.tensor_parallel_size
        if world_size % size:
            raise ValueError(
                f"vllm.tensor_parallel_size = {size} does not divide the {world_size} ranks of "
                "the mesh (megatron.world_size)"
            )
        self.settings = settings
        self.version = 0
        self.leader_rank = rank // size * size
        self._tokenizer = load_tokenizer(settings.model_dir)
        self._requests: dict[int, SampleRequest] = {}
        self._unusable: str | None = None
        import_vllm()
        register_architectures(read_config(settings.model_dir).get("architectures", ()))
        with (
            launched_as(rank, world_size),
            private_shared_memory(),
            unchanged_random_state(),
        ):
            self._llm = _start(settings)
        self._vocab_size = self._llm.model_config.get_vocab_size()
        self._update = _weight_update(self._llm, settings.dtype)

    # Drawing responses.

    def add(self, requests: Sequence[SampleRequest], sampling: SamplingParams) -> None:
        """Queue requests; see ``Engine.add``."""
        self._require_whole_weights()
        self._check(requests, sampling)
        for request in requests:
            self._requests[request.sample_id] = request
            self._llm.add_request(
                str(request.sample_id),
                {"prompt_token_ids": list(request.prompt_ids)},
                _vllm_sampling_params(sampling, request.seed),
            )

    def step(self) -> list[FinishedSample]:
        """Advance every running response by one token; see ``Engine.step``."""
        self._require_whole_weights()
        # Per-request seeds decide the tokens, yet vLLM draws from the global generators too.
        with unchanged_random_state():
            outputs = self._llm.step()
        return [self._finished(cast("RequestOutput", output)) for output in outputs]

    def abort(self, sample_ids: Sequence[int]) -> list[FinishedSample]:
        """Stop these responses and return what they had drawn; see ``Engine.abort``."""
        stopped = {str(i): self._requests.pop(i) for i in sample_ids if i in self._requests}
        samples = []
        for state in self._llm.output_processor.request_states.values():
            if (request := stopped.get(state.external_req_id)) is not None:
                assert state.detokenizer is not None and state.logprobs_processor is not None
                token_ids = tuple(state.detokenizer.output_token_ids)
                log_probs = _log_probs(state.logprobs_processor.logprobs, len(token_ids))
                samples.append(
                    FinishedSample(
                        request.sample_id, request.prompt_ids, token_ids, log_probs, "abort"
                    )
                )
        self._llm.abort_request(list(stopped))
        return samples

    @property
    def num_unfinished(self) -> int:
        """Responses queued or running."""
        return len(self._requests)

    def generate(self, request: GenerateRequest) -> tuple[Rollouts, list[SampleInfo]]:
        """Draw all responses of a request, in its order.

        Every rank of the engine returns the same; ``request.key`` is for the caller.

        Raises:
            ValueError: a prompt is empty, or with ``max_new_tokens`` exceeds the context.
            EngineUnusableError: the weights are between two versions.
        """
        samples = draw(self, request.requests, request.sampling)
        texts = [  # batch_decode takes no sequences for one empty sequence
            str(self._tokenizer.decode(response_ids(sample), skip_special_tokens=True))
            for sample in samples
        ]
        infos = [
            SampleInfo(
                sample_id=sample.sample_id,
                prompt_len=len(sample.prompt_ids),
                response_len=len(sample.token_ids),
                finish_reason=sample.finish_reason,
                response=text,
                holder_rank=self.leader_rank,
            )
            for sample, text in zip(samples, texts, strict=True)
        ]
        return pack(samples), infos

    # Taking new weights.

    def load_time_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter of this rank as a checkpoint loads, by vLLM's name."""
        return self._update.load_time_shapes()

    def require_parameters(self, planned: Mapping[str, tuple[int, ...]]) -> None:
        """Check that a plan writes exactly ``load_time_shapes``; before the first sync.

        Args:
            planned: shape of everything that the plan writes on this rank, by name.

        Raises:
            ValueError: listing what is only here, only in the plan, or of another shape.
        """
        self._update.require(planned)

    def begin_update(self) -> dict[str, torch.Tensor]:
        """Destination of every parameter of this rank, by vLLM's name, in ``load_time_shapes``.

        The caller overwrites all of them, on every rank, then calls ``finish_update``.

        Raises:
            ValueError: responses are still running.
        """
        if self._requests:
            raise ValueError(
                f"weights cannot change while {len(self._requests)} responses are running: "
                "finish or abort them first"
            )
        self._unusable = f"the update that follows version {self.version} has not finished"
        return self._update.begin()

    def finish_update(self, version: int) -> None:
        """Make the written weights the engine's weights, and forget what older ones computed.

        Raises:
            EngineUnusableError: the prefix cache could not be reset.
        """
        assert self._unusable is not None, "finish_update without begin_update"
        self._update.finish()
        if not self._llm.reset_prefix_cache():
            self._unusable = f"the prefix cache still holds weights of version {self.version}"
            self._require_whole_weights()
        self.version = version
        self._unusable = None

    def _require_whole_weights(self) -> None:
        if self._unusable is not None:
            raise EngineUnusableError(f"the engine refuses to generate: {self._unusable}")

    def _check(self, requests: Sequence[SampleRequest], sampling: SamplingParams) -> None:
        """Refuse before anything is queued, so that an error leaves the engine as it was."""
        limit = self.settings.max_model_len
        seen = set(self._requests)
        for request in requests:
            num_prompt, who = len(request.prompt_ids), f"sample {request.sample_id}"
            if not num_prompt:
                raise ValueError(f"{who} has an empty prompt")
            if num_prompt + sampling.max_new_tokens > limit:
                raise ValueError(
                    f"{who}: a prompt of {num_prompt} tokens and rollout.max_new_tokens = "
                    f"{sampling.max_new_tokens} exceed the engine's context of {limit} tokens "
                    "(data.max_len)"
                )
            if max(request.prompt_ids) >= self._vocab_size:
                raise ValueError(
                    f"{who}: prompt token {max(request.prompt_ids)} is not in the model's "
                    f"vocabulary of {self._vocab_size} (the tokenizer and config.json of "
                    "actor.model_name_or_path disagree)"
                )
            if request.sample_id in seen:
                raise ValueError(f"{who} is asked for twice")
            seen.add(request.sample_id)

    def _finished(self, output: RequestOutput) -> FinishedSample:
        (completion,) = output.outputs
        request = self._requests.pop(int(output.request_id))
        token_ids = tuple(completion.token_ids)
        return FinishedSample(
            sample_id=request.sample_id,
            prompt_ids=request.prompt_ids,
            token_ids=token_ids,
            log_probs=_log_probs(completion.logprobs, len(token_ids)),
            finish_reason=_FINISH_REASONS[completion.finish_reason],
        )


def _log_probs(flat: SampleLogprobs | None, num_tokens: int) -> tuple[float, ...]:
    """One log-probability per token from vLLM's flat record of them."""
    from vllm.logprobs import FlatLogprobs

    assert isinstance(flat, FlatLogprobs) and len(flat.logprobs) == num_tokens
    return tuple(flat.logprobs)


def _start(settings: EngineSettings) -> LLMEngine:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    llm = LLMEngine.from_engine_args(
        EngineArgs(
            model=settings.model_dir,
            skip_tokenizer_init=True,  # prompts and responses are token ids
            generation_config="vllm",  # sampling and stop tokens come with each request only
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=settings.tensor_parallel_size,
            dtype="float32" if settings.dtype == "fp32" else "bfloat16",
            max_model_len=settings.max_model_len,
            kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
            # Decides nothing beside an explicit cache size, except that vLLM would not start
            # with less memory free; the trainer holds what it holds.
            gpu_memory_utilization=0.01,
            max_num_seqs=settings.max_num_seqs,
            enable_prefix_caching=settings.enable_prefix_caching,
            enforce_eager=settings.enforce_eager,
            seed=settings.seed,
            # Other expert kernels on CUDA reorder the weights in ways that no update here knows.
            moe_backend="triton" if torch.cuda.is_available() else "auto",
            # log-softmax(logits / temperature): what the trainer computes.
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
    )
    # Collected or at exit, vLLM would destroy the default process group: it is the mesh's.
    cast(Any, llm.engine_core)._finalizer.detach()
    return llm


def _weight_update(llm: LLMEngine, dtype: str) -> WeightUpdate:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    executor = cast(Any, llm.model_executor)
    return WeightUpdate(
        executor.driver_worker.worker.model_runner.model,
        lambda module: get_layerwise_info(module).restore_metadata[0],
        torch.float32 if dtype == "fp32" else torch.bfloat16,
    )


def _vllm_sampling_params(sampling: SamplingParams, seed: int) -> VLLMSamplingParams:
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VLLMSamplingParams

    return VLLMSamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # the request names every stop token
        seed=seed,
        logprobs=0,  # of the drawn token alone
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
