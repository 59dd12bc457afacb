"""The demo's engine on a tiny Llama with random weights: its tokens are transformers' own, whatever was loaded."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvtiers.connector.base import OffloadingHandler, TransferResult, TransferSpec  # noqa: E402
from kvtiers.connector.demo.engine import Engine, Request  # noqa: E402
from kvtiers.connector.demo.model import LoadedModel  # noqa: E402
from kvtiers.connector.demo.paged_cache import KVLayout, PagedKVCache  # noqa: E402
from kvtiers.connector.demo.worker import make_spec  # noqa: E402
from kvtiers.connector.spec import DeploymentSpec  # noqa: E402
from kvtiers.tiers.blocks.keys import OffloadKey  # noqa: E402
from kvtiers.tiers.config.deployment import parse_config  # noqa: E402
from kvtiers.tiers.errors import ConfigError  # noqa: E402
from tests.tiny_model import make_tiny_llama  # noqa: E402
from tests.waiting import PATIENT  # noqa: E402

BLOCK_SIZE = 4
NEW_TOKENS = 10
PROMPT = [(7 * index * index + 3 * index) % 61 for index in range(50)]
OTHER = [(5 * index * index + index) % 59 for index in range(50)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """More only wait for each other on a model of this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel("tiny", "1", make_tiny_llama(), None, frozenset())


def reference(model: LoadedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    return [int(token) for token in out[0, len(prompt) :]]


Start = Callable[..., tuple[Engine, DeploymentSpec]]


@pytest.fixture
def start(model: LoadedModel, tmp_path: Path) -> Iterator[Start]:
    """Makes an engine with a region and a folder of blocks. Another engine on the same folder is another process."""
    started: list[tuple[Engine, DeploymentSpec]] = []

    def start(
        blocks_per_chunk: int = 1, region_blocks: int = 32, of: LoadedModel = model
    ) -> tuple[Engine, DeploymentSpec]:
        layout = KVLayout.of_model(of.module)
        memory = PagedKVCache(layout, num_blocks=24, block_size=BLOCK_SIZE, device=of.device)
        random.Random(len(started)).shuffle(memory.block_ids)
        row_bytes = -(-memory.block_bytes * blocks_per_chunk // 4096) * 4096
        tier = {"type": "fs", "root_dir": str(tmp_path / "blocks"), "min_free": 0, "isolation": "thread", **PATIENT}
        deployment = parse_config(
            {
                "region": {"size": region_blocks * row_bytes},
                "blocks_per_chunk": blocks_per_chunk,
                "tiers": [tier],
            }
        )
        spec = make_spec(of, memory, deployment)
        started.append((Engine(of, memory, spec, store_chunks_max=region_blocks), spec))
        return started[-1]

    yield start
    for engine, spec in started:
        engine.shutdown()
        spec.shutdown()


def ask(engine: Engine, prompt: list[int], **options: Any) -> Request:
    request = engine.run(prompt, max_new_tokens=NEW_TOKENS, **options)
    engine.drain()
    return request


# ---- what is computed ------------------------------------------------------------------------------------------


def test_kv_layout_is_read_from_the_model(model: LoadedModel) -> None:
    assert KVLayout.of_model(model.module) == KVLayout(3, 2, 8, torch.float32)


@pytest.mark.parametrize("prefill_chunk_tokens", [1, 7, 4096])
@pytest.mark.parametrize("length", [1, 4, 31, 50])
def test_cold_generation_equals_transformers(
    model: LoadedModel, start: Start, length: int, prefill_chunk_tokens: int
) -> None:
    engine, _ = start()
    prompt = PROMPT[:length]
    request = ask(engine, prompt, prefill_chunk_tokens=prefill_chunk_tokens)
    assert request.answer == reference(model, prompt)
    assert request.ttft_s > 0


def test_generation_with_sliding_windows_equals_transformers(start: Start) -> None:
    """Layers that see the last tokens only find the others in their blocks, and look away."""
    config = transformers.Gemma3TextConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=7,  # the sixth sees all
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        initializer_range=0.3,
        eos_token_id=None,
    )
    gemma = LoadedModel("tiny", "1", transformers.Gemma3ForCausalLM(config).eval(), None, frozenset())
    engine, _ = start(of=gemma)
    request = ask(engine, PROMPT, prefill_chunk_tokens=7)
    assert request.answer == reference(gemma, PROMPT)


def test_a_stop_token_ends_the_answer(model: LoadedModel, start: Start) -> None:
    expected = reference(model, PROMPT)
    stop = expected[3]
    stopping = LoadedModel("tiny", "1", model.module, None, frozenset({stop}))
    engine, _ = start(of=stopping)
    assert ask(engine, PROMPT).answer == expected[: expected.index(stop) + 1]


@pytest.mark.parametrize(("prompt", "new_tokens"), [([], 1), ([1], 0), (PROMPT * 2, 1)])
def test_request_that_can_never_run_is_refused(start: Start, prompt: list[int], new_tokens: int) -> None:
    engine, _ = start()
    with pytest.raises(ConfigError, match="accepted are"):
        engine.run(prompt, max_new_tokens=new_tokens)


def test_a_model_without_plain_attention_is_refused() -> None:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ConfigError, match="plain attention in every layer"):
        KVLayout.of_model(transformers.MambaForCausalLM(config).eval())


def test_a_model_with_plain_attention_in_some_layers_is_refused() -> None:
    config = transformers.Lfm2Config(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    with pytest.raises(ConfigError, match="plain attention in every layer"):
        KVLayout.of_model(transformers.Lfm2ForCausalLM(config).eval())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0},
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 32,
            "rope_theta": 10_000.0,
        },
    ],
    ids=["dynamic", "longrope"],
)
def test_model_whose_keys_depend_on_prompt_length_is_refused(rope: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters=rope,
    )
    with pytest.raises(ConfigError, match=rf"--model: .* the prompt's length \(rope_type '{rope['rope_type']}'\)"):
        KVLayout.of_model(transformers.LlamaForCausalLM(config).eval())


# ---- what is stored and loaded ----------------------------------------------------------------------------------


def tokens_forwarded(model: LoadedModel, engine: Engine, prompt: list[int]) -> tuple[Request, list[int]]:
    """The request, and how many tokens each forward computed."""
    lengths: list[int] = []
    hook = model.module.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    try:
        return ask(engine, prompt), lengths
    finally:
        hook.remove()


@pytest.mark.parametrize(("blocks_per_chunk", "length"), [(1, 8), (1, 48), (2, 49), (3, 47), (3, 48)])
def test_answer_with_loaded_prefix_equals_computed_answer(
    model: LoadedModel, start: Start, blocks_per_chunk: int, length: int
) -> None:
    prompt = PROMPT[:length]
    first, _ = start(blocks_per_chunk)
    cold = ask(first, prompt)
    assert cold.answer == reference(model, prompt)
    assert (cold.blocks_hit, cold.tokens_loaded) == (0, 0)

    second, _ = start(blocks_per_chunk)
    warm, lengths = tokens_forwarded(model, second, prompt)
    chunk = BLOCK_SIZE * blocks_per_chunk
    assert warm.answer == cold.answer
    assert warm.blocks_hit == warm.blocks_total == length // chunk
    # At least the last token is computed, and nothing else that was stored.
    loaded = min(length // chunk * chunk, (length - 1) // BLOCK_SIZE * BLOCK_SIZE)
    assert warm.tokens_loaded == loaded
    assert lengths == ([length - loaded] if loaded or length else []) + [1] * (NEW_TOKENS - 1)
    assert second.loaded.bytes == loaded // BLOCK_SIZE * second.memory.block_bytes


def test_common_beginning_of_two_prompts_is_loaded(model: LoadedModel, start: Start) -> None:
    first, _ = start()
    ask(first, PROMPT)
    second, _ = start()
    mixed = PROMPT[:26] + OTHER[26:]
    request, lengths = tokens_forwarded(model, second, mixed)
    assert request.answer == reference(model, mixed)
    assert request.blocks_hit == 26 // BLOCK_SIZE
    assert lengths[0] == len(mixed) - 24
    assert ask(second, mixed).blocks_hit == len(mixed) // BLOCK_SIZE


def test_blocks_of_the_answer_are_stored(model: LoadedModel, start: Start) -> None:
    """The next turn of a conversation finds prompt and answer."""
    first, _ = start()
    turn = ask(first, PROMPT)
    # The last token was sampled and never computed.
    stored = (len(PROMPT) + NEW_TOKENS - 1) // BLOCK_SIZE
    second, _ = start()
    next_turn = PROMPT + turn.answer + OTHER[:5]
    request = ask(second, next_turn)
    assert request.blocks_hit == stored
    assert request.answer == reference(model, next_turn)


def test_prompt_is_loaded_from_tier_after_region_reset(model: LoadedModel, start: Start) -> None:
    engine, spec = start()
    ask(engine, PROMPT)
    engine.reset_cache()
    request = ask(engine, PROMPT)
    assert request.blocks_hit == request.blocks_total
    assert request.answer == reference(model, PROMPT)
    assert spec.metrics.value("kvtiers_bytes_total", "fs", "load") > 0


def blocks_lost(spec: DeploymentSpec) -> float:
    return sum(sample.value for sample in spec.metrics.snapshot() if sample.name == "kvtiers_stores_dropped_total")


def test_prompt_larger_than_the_region_is_stored_whole_and_answered_right(model: LoadedModel, start: Start) -> None:
    engine, spec = start(region_blocks=5)
    assert ask(engine, PROMPT).answer == reference(model, PROMPT)
    # Piece by piece, all of it is stored; the last token was sampled and never computed.
    stored = (len(PROMPT) + NEW_TOKENS - 1) // BLOCK_SIZE
    assert spec.metrics.value("kvtiers_blocks_total", "fs", "store", "moved") == stored
    assert blocks_lost(spec) == 0
    second, _ = start(region_blocks=5)
    assert ask(second, PROMPT).answer == reference(model, PROMPT)
    third, _ = start()
    assert ask(third, PROMPT).blocks_hit == len(PROMPT) // BLOCK_SIZE


def test_blocks_of_answer_wait_for_slots_of_running_stores_and_none_is_lost(
    model: LoadedModel, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, spec = start(region_blocks=16)
    monkeypatch.setattr(engine._manager, "on_schedule_end", lambda: None)  # the tier reports nothing meanwhile
    ask(engine, PROMPT, load=False)
    assert blocks_lost(spec) == 0
    stored = (len(PROMPT) + NEW_TOKENS - 1) // BLOCK_SIZE
    assert spec.metrics.value("kvtiers_blocks_total", "fs", "store", "moved") == stored


def test_prompt_with_corrupt_blocks_is_computed_again(model: LoadedModel, start: Start, tmp_path: Path) -> None:
    first, _ = start()
    ask(first, PROMPT)
    files = list((tmp_path / "blocks").rglob("*.bin"))
    assert len(files) >= len(PROMPT) // BLOCK_SIZE
    for file in files:
        data = bytearray(file.read_bytes())
        data[100] ^= 1
        file.write_bytes(data)
    second, _ = start()
    request = ask(second, PROMPT)
    assert (request.blocks_hit, request.tokens_loaded) == (0, 0)
    assert request.answer == reference(model, PROMPT)


class BrokenHandler(OffloadingHandler):
    """Refuses transfers, or accepts them and reports that they failed after destroying the target."""

    def __init__(self, inner: OffloadingHandler, *, accepts: bool) -> None:
        self._inner = inner
        self._accepts = accepts

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        return self._accepts and self._inner.transfer_async(job_id, spec)

    def get_finished(self) -> list[TransferResult]:
        return [TransferResult(result.job_id, False, 0, 0.0) for result in self._inner.get_finished()]

    def wait(self, job_ids: Collection[int]) -> None:
        self._inner.wait(job_ids)


@pytest.mark.parametrize("accepts", [False, True])
def test_prompt_with_failed_load_is_computed_again(model: LoadedModel, start: Start, accepts: bool) -> None:
    engine, spec = start()
    ask(engine, PROMPT)
    engine._load_handler = BrokenHandler(engine._load_handler, accepts=accepts)
    request = ask(engine, PROMPT)
    assert request.blocks_hit == request.blocks_total
    assert request.tokens_loaded == 0
    assert request.answer == reference(model, PROMPT)
    assert spec.metrics.value("kvtiers_slots", "pinned") == 0


@pytest.mark.parametrize("accepts", [False, True])
def test_failed_store_is_a_miss_in_the_next_lookup(model: LoadedModel, start: Start, accepts: bool) -> None:
    engine, _ = start()
    engine._store_handler = BrokenHandler(engine._store_handler, accepts=accepts)
    assert ask(engine, PROMPT).answer == reference(model, PROMPT)
    again = ask(engine, PROMPT, store=False)
    assert again.blocks_hit == 0
    assert again.answer == reference(model, PROMPT)


def test_first_store_follows_the_first_token(model: LoadedModel, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = start()
    answered: list[int] = []
    prepare_store = engine._manager.prepare_store

    def spy(keys: Collection[OffloadKey], context: Any) -> Any:
        assert engine._request is not None
        answered.append(len(engine._request.answer))
        return prepare_store(keys, context)

    monkeypatch.setattr(engine._manager, "prepare_store", spy)
    engine.run(PROMPT, max_new_tokens=NEW_TOKENS, prefill_chunk_tokens=8)
    assert answered
    assert answered[0] == 1


def test_request_without_load_or_store_moves_no_blocks(model: LoadedModel, start: Start, tmp_path: Path) -> None:
    engine, _ = start()
    ask(engine, PROMPT, store=False)
    assert not list((tmp_path / "blocks").rglob("*.bin"))
    ask(engine, PROMPT)
    request = ask(engine, PROMPT, load=False)
    assert (request.blocks_hit, request.tokens_loaded) == (0, 0)
    assert request.answer == reference(model, PROMPT)
