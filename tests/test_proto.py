"""The committed stubs are what the proto file gives, and the interface keeps its rules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).parents[1]
PROTO = "proto/ds4jax/v1/generation.proto"
STUBS = ROOT / "server/ds4jax_server/pb"


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stubs")
    command = [
        sys.executable, "-m", "grpc_tools.protoc", "-I", "ds4jax_server/pb=proto/ds4jax/v1",
        f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}",
        f"--descriptor_set_out={out}/set.bin", PROTO,
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True)
    return out


def test_the_committed_stubs_describe_the_proto_file(generated: Path) -> None:
    from ds4jax_server.pb import generation_pb2

    wanted = descriptor_pb2.FileDescriptorSet.FromString((generated / "set.bin").read_bytes())
    have = descriptor_pb2.FileDescriptorProto()
    generation_pb2.DESCRIPTOR.CopyToProto(have)
    assert [f.name for f in wanted.file] == ["ds4jax_server/pb/generation.proto"]
    for file in (wanted.file[0], have):
        file.ClearField("source_code_info")
        for message in file.message_type:
            _clear_json_names(message)
    assert have == wanted.file[0]


def _clear_json_names(message: descriptor_pb2.DescriptorProto) -> None:
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _clear_json_names(nested)


@pytest.mark.parametrize("name", ["generation_pb2_grpc.py", "generation_pb2.pyi"])
def test_the_committed_text_is_what_the_compiler_writes(generated: Path, name: str) -> None:
    def lines(folder: Path) -> list[str]:
        text = (folder / name).read_text().splitlines()
        return [x for x in text if "VERSION" not in x.upper()]

    assert lines(generated / "ds4jax_server/pb") == lines(STUBS)


def test_scalars_whose_zero_means_something_have_presence() -> None:
    from ds4jax_server.pb import generation_pb2 as pb

    for message in (pb.SamplingParams, pb.StoppingCriteria):
        for field in message.DESCRIPTOR.fields:
            if field.is_repeated or field.message_type or field.name == "ignore_eos":
                continue
            assert field.has_presence, f"{message.DESCRIPTOR.name}.{field.name}"


def test_enums_start_unspecified_and_carry_their_prefix() -> None:
    from ds4jax_server.pb import generation_pb2 as pb

    def enums(scope):
        yield from scope.enum_types_by_name.values()
        nested = getattr(scope, "message_types_by_name", None) or scope.nested_types_by_name
        for message in nested.values():
            yield from enums(message)

    found = list(enums(pb.DESCRIPTOR))
    assert len(found) >= 12
    for enum in found:
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")
        prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
        assert all(v.name.startswith(prefix) for v in enum.values), enum.full_name
