"""Checkpoint folders: read what is whole, name what is not, and never leave half a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megappo.weights.families import load_shape
from megappo.weights.hf_files import CheckpointReader, CheckpointWriter, Entry
from tests.support.models import make_llama
from tests.support.weights import Tensors, assert_equal_ranks


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in several shards, with two EOS ids, an added token and a chat template."""
    folder = make_llama(
        tmp_path_factory.mktemp("models") / "source",
        layers=2,
        eos=[2, 7],
        max_shard_size="50KB",
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(folder)
    return folder


def _weights(folder: Path) -> Tensors:
    return {k: t for f in folder.glob("*.safetensors") for k, t in load_file(f).items()}


def _entries(weights: Tensors) -> dict[str, Entry]:
    return {name: Entry(t.dtype, tuple(t.shape)) for name, t in weights.items()}


def _siblings(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.parent.iterdir())


def test_reader_slices_single_files_and_shards(source: Path, tmp_path: Path) -> None:
    """Boxes read from either form equal the same boxes of whole tensors."""
    single = make_llama(tmp_path, layers=2, dtype=torch.bfloat16)
    for folder, dtype in ((source, torch.float32), (single, torch.bfloat16)):
        reader, weights = CheckpointReader(folder), _weights(folder)
        assert reader.names == set(weights)
        for name, tensor in weights.items():
            assert reader.shape(name) == tuple(tensor.shape)
            assert reader.dtype(name) == dtype
        name = "model.layers.1.self_attn.q_proj.weight"
        box = reader.read(name, (3, 10), (40, 7))
        assert torch.equal(box, weights[name][3:43, 10:17])
        assert torch.equal(reader.read("model.norm.weight", (5,), (9,)), _norm(weights)[5:14])


def _norm(weights: Tensors) -> torch.Tensor:
    return weights["model.norm.weight"]


def test_round_trip_keeps_tokenizer_and_generation(source: Path, tmp_path: Path) -> None:
    """C10: same chat text, tokenizer length, EOS list and heads; transformers loads it whole."""
    weights, out = _weights(source), tmp_path / "out"
    writer = CheckpointWriter(out, _entries(weights), source, max_shard_bytes=60_000)
    for name, tensor in weights.items():
        writer.add(name, tensor)
    writer.commit()
    tokenizers = [AutoTokenizer.from_pretrained(f) for f in (source, out)]
    chat = [{"role": "user", "content": "1+1"}]
    rendered = [t.apply_chat_template(chat, tokenize=False) for t in tokenizers]
    assert rendered[0] == rendered[1] == "user: 1+1\n"
    assert [len(t) for t in tokenizers] == [102, 102]
    assert GenerationConfig.from_pretrained(out).eos_token_id == [2, 7]
    assert AutoConfig.from_pretrained(out).num_key_value_heads == 2
    assert_equal_ranks([AutoModelForCausalLM.from_pretrained(out).state_dict()], [weights])
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights.values())
    assert set(index["weight_map"]) == set(weights)
    assert load_shape(out) == load_shape(source)


@pytest.mark.parametrize(
    "lost",
    [
        ["model.layers.0.input_layernorm.weight"],
        ["model.layers.1.post_attention_layernorm.weight", "lm_head.weight"],
        ["model.norm.weight"],
        ["model.embed_tokens.weight"],
    ],
)
def test_lost_tensor_leaves_no_folder(source: Path, tmp_path: Path, lost: list[str]) -> None:
    """C7: the error lists what never came, and nothing is left that looks finished."""
    weights = _weights(source)
    out = tmp_path / "out"
    writer = CheckpointWriter(out, _entries(weights), source, max_shard_bytes=50_000)
    for name, tensor in weights.items():
        if name not in lost:
            writer.add(name, tensor)
    with pytest.raises(ValueError, match=f"{len(lost)} tensors are missing: ") as error:
        writer.commit()
    assert all(name in str(error.value) for name in lost)
    assert not out.exists()
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_unexpected_tensors_are_refused(source: Path, tmp_path: Path) -> None:
    """C7: a strange name, a second copy and another shape are errors at once."""
    writer = CheckpointWriter(
        tmp_path / "out", _entries({"a": torch.zeros(2, 3), "b": torch.zeros(1)}), source
    )
    writer.add("b", torch.zeros(1))
    strange = [("c", torch.zeros(1)), ("b", torch.zeros(1)), ("a", torch.zeros(3, 2))]
    for name, tensor in (*strange, ("a", torch.zeros(2, 3).half())):
        with pytest.raises(ValueError, match=f"{name} (is not expected, or came twice|has shape)"):
            writer.add(name, tensor)
    writer.discard()


def test_an_older_checkpoint_is_replaced_whole(source: Path, tmp_path: Path) -> None:
    """The old folder stands until the new one does; foreign folders are never touched."""
    out = tmp_path / "out"
    for value in (1.0, 2.0):
        writer = CheckpointWriter(out, _entries({"a": torch.zeros(2)}), source)
        writer.add("a", torch.full((2,), value))
        assert out.exists() == (value == 2.0)
        writer.commit()
        assert _siblings(out) == ["out"]
    assert torch.equal(_weights(out)["a"], torch.full((2,), 2.0))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("x")
    for target, words in ((foreign, "no Hugging Face folder"), (source, "came from")):
        with pytest.raises(ValueError, match=words):
            CheckpointWriter(target, _entries({"a": torch.zeros(2)}), source)


def test_wrong_folders_are_explained(source: Path, tmp_path: Path) -> None:
    """C12: what was found, what was expected, what to pass instead; one line each."""
    empty = tmp_path / "empty"
    empty.mkdir()
    step = tmp_path / "step_10"
    make_llama(step / "actor", layers=1)
    file = tmp_path / "file"
    file.write_text("")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((source / "config.json").read_bytes())
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_bytes((source / "config.json").read_bytes())
    (pickled / "pytorch_model.bin").write_bytes(b"")
    for folder, words in (
        (tmp_path / "nowhere", "does not exist: expected a Hugging Face folder"),
        (empty, r"has no config\.json \(the folder is empty\)"),
        (step, rf"found actor.*pass {step}/actor instead"),
        (file, "is a file"),
        (bare, r"neither model\.safetensors nor model\.safetensors\.index\.json"),
        (pickled, r"only pickled weights \(pytorch_model\.bin\)"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            load_shape(folder)
        assert "\n" not in str(error.value)
    assert load_shape(step / "actor").num_layers == 1


def test_damaged_weights_are_named(source: Path, tmp_path: Path) -> None:
    """C12: a missing shard, a cut-off or empty file, an index without entries."""
    for damage, words in (
        ("missing", r"names shards, missing: model-00003-of-"),
        ("cut", r"model-00001-of-\d+\.safetensors is not whole"),
        ("empty", r"model-00001-of-\d+\.safetensors is not whole"),
        ("index", r"missing: every file"),
    ):
        folder = tmp_path / damage
        folder.mkdir()
        for file in source.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        shards = sorted(folder.glob("*.safetensors"))
        if damage == "missing":
            shards[2].unlink()
        elif damage == "index":
            (folder / "model.safetensors.index.json").write_text("{}")
        else:
            data = shards[0].read_bytes()
            shards[0].write_bytes(data[:-5] if damage == "cut" else b"")
        with pytest.raises(ValueError, match=words):
            reader = CheckpointReader(folder)
            for name in reader.names:
                reader.shape(name)


def test_writer_failing_midway_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """A target that cannot be made: the error is the system's, and no folder is left."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        CheckpointWriter(tmp_path / "file" / "out", _entries({"a": torch.zeros(2)}), source)
    assert _siblings(tmp_path / "file") == ["file"]
