"""Facts about the machine and the installation, and what they mean for running a model.

`gather` reads package versions, files of the kernel and environment variables; `probe_jax` asks JAX
about its devices in a process of its own, so that a driver that crashes or hangs takes nothing with
it; `advise` turns facts into advice and touches nothing, so it can be tested for machines that are
not here. JAX is not imported.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

PACKAGES = (
    "ds4jax", "jax", "jaxlib", "jax-rocm7-plugin", "jax-rocm7-pjrt", "jax-cuda12-plugin",
    "jax-cuda13-plugin", "rocm-sdk-core", "numpy", "flax", "ml_dtypes", "tokenizers", "gguf",
    "safetensors", "grpcio", "protobuf", "huggingface-hub", "triton",
)  # fmt: skip
ROCM_PAIR = ("jax-rocm7-plugin", "jax-rocm7-pjrt")
KERNEL_TARGETS = ("gfx1151", "gfx1201", "gfx942", "gfx950")
"""AMD architectures that the kernels are compiled and checked for."""

VARIABLES = (
    "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION", "HSA_OVERRIDE_GFX_VERSION", "HSA_ENABLE_SDMA",
    "HSA_XNACK", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
    "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "ROCM_PATH", "DS4JAX_COMPILE_CACHE",
)  # fmt: skip

_MIN_JAX, _MAX_JAX = (0, 10, 2), (0, 13)

Level = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True)
class GpuNode:
    """A GPU as the AMD kernel driver lists it."""

    node: int
    gfx: str
    memory_bytes: int  # of the largest heap; 0 if not told
    links: tuple[int, ...] = ()  # nodes with a direct link (peer access)


@dataclass(frozen=True)
class Advice:
    """One finding and what to do about it; `fix` is empty for level ok."""

    level: Level
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Facts:
    """What `gather` found. `jax` is the result of `probe_jax`, None if it was not asked."""

    python: str
    system: str
    packages: Mapping[str, str | None]
    environment: Mapping[str, str]
    gpus: tuple[GpuNode, ...] = ()
    amd_driver: bool = False  # the amdgpu compute device node exists
    amd_access: bool = False  # and this user may use it
    rocm_version: str | None = None
    nvidia_driver: str | None = None
    memory_bytes: int = 0
    jax: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


# -- gathering -------------------------------------------------------------------------------------


def gather(environ: Mapping[str, str], root: Path = Path("/")) -> Facts:
    """Facts of this machine, without JAX. `root` is where its file system is mounted."""
    kfd = root / "dev" / "kfd"
    return Facts(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        packages={name: _version(name) for name in PACKAGES},
        environment={name: environ[name] for name in VARIABLES if name in environ},
        gpus=_gpu_nodes(root / "sys" / "class" / "kfd" / "kfd" / "topology" / "nodes"),
        amd_driver=kfd.exists(),
        amd_access=os.access(kfd, os.R_OK | os.W_OK),
        rocm_version=_rocm_version(root, environ),
        nvidia_driver=_first_match(root / "proc/driver/nvidia/version", r"(\d+\.\d+(?:\.\d+)?)"),
        memory_bytes=_memory(root / "proc" / "meminfo"),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _first_match(path: Path, pattern: str) -> str | None:
    match = re.search(pattern, _read(path))
    return match[1] if match else None


def _rocm_version(root: Path, environ: Mapping[str, str]) -> str | None:
    places = [environ["ROCM_PATH"]] if environ.get("ROCM_PATH") else []
    for place in (*places, str(root / "opt" / "rocm")):
        if found := _first_match(Path(place) / ".info" / "version", r"(\d+\.\d+(?:\.\d+)?)"):
            return found
    return None


def _memory(path: Path) -> int:
    match = re.search(r"MemTotal:\s+(\d+) kB", _read(path))
    return int(match[1]) * 1024 if match else 0


def _properties(path: Path) -> dict[str, int]:
    pairs = re.findall(r"^(\w+) (\d+)$", _read(path), re.MULTILINE)
    return {name: int(value) for name, value in pairs}


def _gpu_nodes(nodes: Path) -> tuple[GpuNode, ...]:
    out = []
    places = nodes.iterdir() if nodes.is_dir() else ()
    for place in sorted((p for p in places if p.name.isdigit()), key=lambda p: int(p.name)):
        version = _properties(place / "properties").get("gfx_target_version", 0)
        if not version:
            continue  # a CPU
        banks = [_properties(p) for p in place.glob("mem_banks/*/properties")]
        links = [_properties(p).get("node_to", -1) for p in place.glob("p2p_links/*/properties")]
        out.append(
            GpuNode(
                node=int(place.name),
                gfx=gfx_name(version),
                memory_bytes=max((b.get("size_in_bytes", 0) for b in banks), default=0),
                links=tuple(sorted(links)),
            )
        )
    return tuple(out)


def gfx_name(version: int) -> str:
    """Architecture name of the kernel's number: 110501 is gfx1151, 90402 gfx942."""
    major, minor, step = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{step:x}"


_PROBE = """
import json, time
start = time.monotonic()
import jax, numpy as np
jax.config.update("jax_numpy_dtype_promotion", "standard")
out = {"jax": jax.__version__, "backend": jax.default_backend(), "devices": []}
for d in jax.devices():
    stats = d.memory_stats() or {}
    out["devices"].append({"id": d.id, "platform": d.platform, "kind": d.device_kind,
        "arch": str(getattr(d, "compute_capability", "")),
        "memory_bytes": int(stats.get("bytes_limit", 0))})
out["start_seconds"] = round(time.monotonic() - start, 3)
a = np.arange(4096, dtype=np.float32).reshape(64, 64) % 7 - 3
start = time.monotonic()
got = np.asarray(jax.jit(lambda x: x @ x)(a))
out["product_is_right"] = bool(np.array_equal(got, a @ a))
out["compile_seconds"] = round(time.monotonic() - start, 3)
print("\\n" + json.dumps(out))
"""


def probe_jax(timeout: float, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """JAX's devices and whether a small product comes out right, from a process of its own.

    Args:
        timeout: seconds.
        environ: of that process; None: this one's.

    Returns: the probe's findings, or `error` with the last lines that it printed.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True, text=True, errors="replace", timeout=timeout,
            env=None if environ is None else dict(environ),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"JAX did not answer within {timeout:g} seconds"}
    if done.returncode == 0:
        try:
            found = json.loads(done.stdout.strip().splitlines()[-1])
        except (ValueError, IndexError):
            found = None
        if isinstance(found, dict):
            return found
    tail = " | ".join(line.strip() for line in done.stderr.strip().splitlines()[-3:])
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
    return {"error": f"JAX ended with {how}: {tail or 'no message'}"}


# -- advice ----------------------------------------------------------------------------------------


def advise(facts: Facts) -> list[Advice]:
    """What is wrong and what to set, most basic things first."""
    return [
        *_about_versions(facts),
        *_about_amd(facts),
        *_about_nvidia(facts),
        *_about_jax(facts),
        *_about_environment(facts),
    ]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3])


def _about_versions(facts: Facts) -> list[Advice]:
    out = []
    if not (3, 11) <= _numbers(facts.python)[:2] <= (3, 13):
        out.append(
            Advice("error", f"Python {facts.python}", "use Python 3.11, 3.12 or 3.13")
        )  # fmt: skip
    jax, jaxlib = facts.packages.get("jax"), facts.packages.get("jaxlib")
    if jax is None:
        return [*out, Advice("error", "jax is not installed", "pip install ds4jax")]
    if not _MIN_JAX <= _numbers(jax) < _MAX_JAX:
        out.append(Advice("error", f"jax {jax}", "pip install 'jax>=0.10.2,<0.13'"))
    if jaxlib is not None and _numbers(jaxlib)[:2] != _numbers(jax)[:2]:
        out.append(
            Advice("error", f"jax {jax} with jaxlib {jaxlib}", f"pip install 'jaxlib=={jax}'")
        )  # fmt: skip
    return out


def _about_amd(facts: Facts) -> list[Advice]:
    versions = [facts.packages.get(name) for name in ROCM_PAIR]
    installed = [f"{n} {v}" for n, v in zip(ROCM_PAIR, versions, strict=True) if v]
    if not facts.gpus and not installed:
        return []
    out = []
    if facts.gpus and not installed:
        kinds = ", ".join(gpu.gfx for gpu in facts.gpus)
        out.append(
            Advice("error", f"AMD GPU ({kinds}) without JAX's ROCm plugin",
                   "pip install 'ds4jax[rocm]'")
        )  # fmt: skip
    elif len(installed) == 1:
        out.append(
            Advice("error", f"only {installed[0]}: the plugin is a pair of packages",
                   f"pip install --upgrade {' '.join(ROCM_PAIR)}")
        )  # fmt: skip
    elif installed:
        wanted = facts.packages.get("jaxlib") or ""
        if len({_numbers(v or "") for v in (*versions, wanted)}) > 1:
            out.append(
                Advice("error", f"{' and '.join(installed)} with jaxlib {wanted}: versions differ",
                       f"pip install '{ROCM_PAIR[0]}=={wanted}' '{ROCM_PAIR[1]}=={wanted}'")
            )  # fmt: skip
    libraries = facts.rocm_version or facts.packages.get("rocm-sdk-core") or _has_gpu(facts.jax)
    if installed and not libraries:
        out.append(
            Advice("error", "ROCm libraries not found; JAX's plugin does not bring them",
                   "install ROCm 7 for the system (/opt/rocm; elsewhere: set ROCM_PATH), or AMD's"
                   " rocm[libraries] wheels for this GPU into this environment")
        )  # fmt: skip
    if not facts.amd_driver:
        out.append(
            Advice("error", "no /dev/kfd: the amdgpu driver is not loaded or not passed through",
                   "load amdgpu; for a container: --device /dev/kfd --device /dev/dri")
        )  # fmt: skip
    elif not facts.amd_access:
        out.append(
            Advice("error", "no access to /dev/kfd",
                   "sudo usermod -aG render,video $USER, then log in again")
        )  # fmt: skip
    return out + _about_gpus(facts.gpus)


def _has_gpu(found: Mapping[str, Any] | None) -> bool:
    """Whether JAX reported a device that is not a CPU."""
    return any(d["platform"] != "cpu" for d in (found or {}).get("devices", ()))


def _about_gpus(gpus: Sequence[GpuNode]) -> list[Advice]:
    out = []
    kinds = sorted({gpu.gfx for gpu in gpus})
    for kind in kinds:
        if kind not in KERNEL_TARGETS:
            out.append(
                Advice("note", f"{kind}: kernels are checked for {', '.join(KERNEL_TARGETS)}",
                       "compare its output with --device cpu before trusting it")
            )  # fmt: skip
    if len(kinds) > 1:
        out.append(
            Advice("warning", f"different GPUs ({', '.join(kinds)}): one process compiles for the"
                   " first one's architecture only",
                   "show each process one kind: ROCR_VISIBLE_DEVICES=0 for the first")
        )  # fmt: skip
    return out


def _about_nvidia(facts: Facts) -> list[Advice]:
    plugin = facts.packages.get("jax-cuda13-plugin") or facts.packages.get("jax-cuda12-plugin")
    if facts.nvidia_driver and not plugin:
        return [
            Advice("error", f"NVIDIA driver {facts.nvidia_driver} without JAX's CUDA plugin",
                   "pip install 'ds4jax[cuda]'")
        ]  # fmt: skip
    return []


def _about_jax(facts: Facts) -> list[Advice]:
    found = facts.jax
    if found is None:
        return []
    if "error" in found:
        fix = "read the message; JAX_PLATFORMS=cpu tells whether the GPU plugin is to blame"
        if "InvalidImage" in found["error"]:
            fix = "set XLA_FLAGS=--xla_gpu_autotune_level=0 (its autotuner lacks this GPU)"
        return [Advice("error", found["error"], fix)]
    out = []
    devices = ", ".join(f"{d['platform']}:{d['id']} {d['kind']}" for d in found["devices"])
    if not found["product_is_right"]:
        out.append(Advice("error", f"a matrix product on {devices} came out wrong",
                          "unset HSA_OVERRIDE_GFX_VERSION; update driver and plugin"))  # fmt: skip
    elif found["backend"] == "cpu" and (facts.gpus or facts.nvidia_driver):
        out.append(
            Advice("error", "there is a GPU, but JAX sees only the CPU",
                   "see the lines above; JAX_PLATFORMS must be unset or name it")
        )  # fmt: skip
    else:
        out.append(Advice("ok", f"JAX computes right on {devices}"))
    return out


def _about_environment(facts: Facts) -> list[Advice]:
    env = facts.environment
    out = []
    if value := env.get("HSA_OVERRIDE_GFX_VERSION"):
        known = all(gpu.gfx in KERNEL_TARGETS for gpu in facts.gpus)
        out.append(
            Advice("warning" if known else "note",
                   f"HSA_OVERRIDE_GFX_VERSION={value} makes the GPU pass for another",
                   "unset it where ROCm knows the GPU: code for another one can hang it")
        )  # fmt: skip
    gpu = bool(facts.gpus or facts.nvidia_driver)
    if gpu and env.get("JAX_PLATFORMS") == "cpu":
        out.append(Advice("note", "JAX_PLATFORMS=cpu hides the GPU", "unset it to use the GPU"))
    if gpu and "--xla_gpu_autotune_level" not in env.get("XLA_FLAGS", ""):
        out.append(
            Advice("note", "XLA times its own matrix products at each first compilation and may"
                   " choose others another time",
                   "XLA_FLAGS=--xla_gpu_autotune_level=0 starts faster and always chooses the same"
                   " ones, perhaps slower ones")
        )  # fmt: skip
    if gpu and not (env.get("DS4JAX_COMPILE_CACHE") or env.get("JAX_COMPILATION_CACHE_DIR")):
        out.append(
            Advice("note", "compiled programs are not kept: every start compiles them again",
                   "DS4JAX_COMPILE_CACHE=$HOME/.cache/ds4jax (or --compile-cache)")
        )  # fmt: skip
    return out
