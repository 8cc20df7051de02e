"""Arrays that are no dumps: tensors of other kinds, damaged members, and zip bombs."""

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from onepolicy.config import UsageError
from onepolicy.record import arrays
from onepolicy.record.read import read_dump

NAMES = ("tokens", "mask", "logp_rollout", "logp_trainer")


def good() -> dict[str, torch.Tensor]:
    return dict.fromkeys(NAMES, torch.zeros(2, 3)) | {"mask": torch.ones(2, 3)}


def read(path: Path) -> None:
    list(read_dump(path, {}))


KINDS = [
    (lambda: torch.quantize_per_tensor(torch.zeros(2, 3), 0.1, 0, torch.quint8), "quint8"),
    (lambda: torch.zeros(2, 3, device="meta"), "meta"),
    (lambda: torch.zeros(2, 3, dtype=torch.complex64), "complex64"),
    (lambda: torch.zeros(2, 3, dtype=torch.complex64).conj(), "complex64"),
    (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "dense tensor"),
    (lambda: torch.zeros(2, 3, dtype=torch.uint8).view(torch.bits8), "bits8"),
    (lambda: torch.zeros(2, 3).to_sparse(), "dense tensor"),
    (lambda: "text", "holds str"),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse")
def test_tensors_of_other_kinds_are_named(tmp_path: Path, subtests) -> None:
    path = tmp_path / "d.pt"
    for make, kind in KINDS:
        torch.save(good() | {"logp_rollout": make()}, path)
        words = rf"d\.pt.*{kind}|d\.pt: not tensors only"
        with subtests.test(kind), pytest.raises(UsageError, match=words):
            read(path)


def test_a_negated_view_is_read(tmp_path: Path) -> None:
    negated = torch.full((2, 3), -1j).conj().imag
    assert negated.is_neg()
    torch.save(good() | {"logp_rollout": -negated.resolve_neg()}, tmp_path / "wanted.pt")
    torch.save(good() | {"logp_rollout": torch._neg_view(torch.ones(2, 3))}, tmp_path / "d.pt")
    (block,) = read_dump(tmp_path / "d.pt", {})
    assert (block.columns["logp_rollout"] == -1).all()


def test_old_files_that_were_cut_are_named(tmp_path: Path) -> None:
    path = tmp_path / "d.pt"
    torch.save(good(), path, _use_new_zipfile_serialization=False)
    read(path)
    data = path.read_bytes()
    for end in [*range(0, len(data), 7), len(data) - 1]:
        path.write_bytes(data[:end])
        with pytest.raises(UsageError, match=r"d\.pt"):
            read(path)


def npz(path: Path, spoil: str, data: bytes) -> Path:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((2, 3)))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in NAMES:
            archive.writestr(f"{name}.npy", data if name == spoil else buffer.getvalue())
    return path


def test_a_member_that_is_no_array_is_named(tmp_path: Path) -> None:
    for data in (b"", b"text", b"PK\x03\x04" * 20, b"\x80\x04K\x01.", b"\x93NUMPY\x01\x00"):
        with pytest.raises(UsageError, match=r"d\.npz: .*logp_rollout\.npy: not an \.npy file"):
            read(npz(tmp_path / "d.npz", "logp_rollout", data))


def test_a_shape_larger_than_its_bytes_is_refused(tmp_path: Path) -> None:
    text = "{'descr': '<f8', 'fortran_order': False, 'shape': (999999999, 999999999), }"
    header = text.ljust(117).encode() + b"\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    with pytest.raises(UsageError, match=r"logp_rollout\.npy: an \.npy of 0 bytes where shape"):
        read(npz(tmp_path / "d.npz", "logp_rollout", data))


def test_an_encrypted_member_is_named(tmp_path: Path) -> None:
    path = npz(tmp_path / "d.npz", "", b"")
    data = bytearray(path.read_bytes())
    flags = ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8))  # in each member's two headers
    for mark, at in flags:
        start = -1
        while (start := data.find(mark, start + 1)) >= 0:
            data[start + at] |= 1
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"d\.npz: \w+\.npy is encrypted"):
        read(path)


def test_rows_without_any_token_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.pt"
    torch.save(dict.fromkeys(NAMES, torch.zeros(2**40, 0)), path)
    with pytest.raises(UsageError, match=r"d\.pt: column tokens: shape \[1099511627776, 0\]"):
        read(path)


def test_tensors_that_find_no_memory_need_more_of_it(tmp_path: Path, monkeypatch) -> None:
    def load(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 64 MiB")

    torch.save({"tokens": torch.zeros(2)}, tmp_path / "d.pt")
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(MemoryError):
        read(tmp_path / "d.pt")


def test_a_number_for_all_tokens_of_the_world_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.pt"
    many = {"mask": torch.zeros(1).expand(2**40)}
    torch.save(dict.fromkeys(NAMES, torch.zeros(2, 3)) | many, path)
    with pytest.raises(UsageError, match=r"d\.pt: column mask: shape \[1099511627776\]"):
        read(path)


def test_narrow_floats_of_safetensors_are_those_of_torch(tmp_path: Path) -> None:
    """All 256 numbers of eight bits, and all of sixteen, read without torch."""
    kinds = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 8, torch.float16: 16, torch.bfloat16: 16}
    for kind, bits in kinds.items():
        stored = torch.arange(2**bits).to(torch.uint8 if bits == 8 else torch.uint16).view(kind)
        save_file({"x": stored}, tmp_path / "d.safetensors")
        with arrays.Safetensors(tmp_path / "d.safetensors") as file:
            np.testing.assert_array_equal(file.read("x"), stored.float().numpy())
