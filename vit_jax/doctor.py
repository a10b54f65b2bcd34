"""Says what is installed, what it runs on and what is known not to work.

  python -m vit_jax.doctor          a table to read, or to paste into a report
  python -m vit_jax.doctor --json   the same for machines

The exit code is 1 when something is known to be bad. Devices are asked for in
a process of their own, so that a broken driver cannot take this one down.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import rich.box
import rich.console
import rich.table
import rich.text
from packaging import requirements, specifiers

PACKAGE = "vit_jax"
# Shown even where our own metadata is missing (a checkout not installed).
CORE = (
  "jax",
  "jaxlib",
  "flax",
  "optax",
  "orbax-checkpoint",
  "grain",
  "clu",
  "numpy",
)
# What no extra of ours brings, by the command that does.
OPTIONAL = {"gcsfs": "pip install 'etils[epath-gcs]'"}
# Packages that overwrite each other's files.
EXCLUSIVE = (
  ("opencv-python", "opencv-python-headless"),
  ("tensorflow", "tensorflow-cpu"),
  ("jax-cuda12-plugin", "jax-cuda13-plugin"),
)
# What jax pins in an extra of this name, and must fit wherever it came from.
PLUGINS = {
  "libtpu": "tpu",
  "jax-cuda12-plugin": "cuda12",
  "jax-cuda13-plugin": "cuda13",
}
DEVICE_SECONDS = 120  # A TPU of another process makes jax wait forever.

_PROBE = """
import json, jax
def memory(device):
  stats = device.memory_stats() or {}
  return {k: stats.get(k) for k in ("bytes_in_use", "bytes_limit")}
devices = [
  {"id": d.id, "platform": d.platform, "kind": d.device_kind, **memory(d)}
  for d in jax.local_devices()
]
print(json.dumps({"backend": jax.default_backend(), "devices": devices}))
"""
_TENSORFLOW_PROBE = """
import tensorflow
print(len(tensorflow.config.list_physical_devices("GPU")))
"""


@dataclasses.dataclass(frozen=True)
class Package:
  """One installed, or missing, distribution.

  Attributes:
    name: of the distribution.
    version: installed, or None.
    tested: range of versions that `vit_jax` declares; "" if it does not.
    ok: whether it is there and within the range.
  """

  name: str
  version: str | None
  tested: str
  ok: bool


@dataclasses.dataclass(frozen=True)
class Devices:
  """What jax runs on.

  Attributes:
    backend: "cpu", "gpu", "tpu"; "" if none came up.
    devices: id, platform, kind, bytes_in_use and bytes_limit of each.
    error: why there is none, or "".
  """

  backend: str
  devices: Sequence[Mapping[str, Any]]
  error: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
  """Something a user should know; `bad` if it is known not to work."""

  text: str
  bad: bool


def main(argv: Sequence[str] | None = None) -> int:
  """Prints the examination and returns the exit code."""
  parser = argparse.ArgumentParser(
    prog=f"python -m {PACKAGE}.doctor",
    description="Says what is installed and what is bad.",
  )
  parser.add_argument("--json", action="store_true", help="for machines")
  arguments = parser.parse_args(argv)

  found = packages()
  host = host_facts()
  devices = probe_devices()
  extras = missing_extras()
  findings = [
    *package_findings(found),
    *clashes(),
    *device_findings(devices, nvidia=has_nvidia(), tpu=has_tpu()),
    *tensorflow_findings(nvidia=has_nvidia()),
  ]
  bad = any(finding.bad for finding in findings)
  if arguments.json:
    everything = {
      "ok": not bad,
      "packages": [dataclasses.asdict(package) for package in found],
      "host": host,
      "devices": dataclasses.asdict(devices),
      "missing_extras": extras,
      "findings": [dataclasses.asdict(finding) for finding in findings],
    }
    sys.stdout.write(json.dumps(everything, indent=2) + "\n")
  else:
    _print(found, host, devices, extras, findings)
  return int(bad)


def packages() -> list[Package]:
  """Returns Python, ourselves and what we need, with the tested ranges."""
  found = [
    _package(
      "python",
      platform.python_version(),
      "".join(_metadata(PACKAGE, "Requires-Python")),
    ),
    _package(PACKAGE, version(PACKAGE), ""),
  ]
  tested = {
    r.name: str(r.specifier) for r in requires(PACKAGE) if _applies(r, "")
  }
  for name in dict.fromkeys((*CORE, *tested)):
    found.append(_package(name, version(name), tested.get(name, "")))
  return found


def missing_extras() -> dict[str, str]:
  """Returns how to install what is optional and missing, by its name."""
  missing = {}
  for extra in _metadata(PACKAGE, "Provides-Extra"):
    absent = [n for n in _brought_by(PACKAGE, extra) if version(n) is None]
    if absent:
      command = _install(extra)
      missing[f"{extra} ({', '.join(absent)})"] = command
  for name, command in OPTIONAL.items():
    if version(name) is None:
      missing[name] = command
  return missing


def host_facts() -> dict[str, str]:
  """Returns system, cores and memory, in words; what is unknown is left out."""
  facts = {"system": platform.platform(), "cpu cores": str(_cores())}
  memory = _memory()
  for name, key in (("memory", "MemTotal"), ("available", "MemAvailable")):
    if key in memory:
      facts[name] = _gib(memory[key])
  platforms = os.environ.get("JAX_PLATFORMS")
  if platforms:
    facts["JAX_PLATFORMS"] = platforms
  return facts


def probe_devices(code: str = _PROBE) -> Devices:
  """Returns the devices that jax finds, or why it finds none."""
  output, error = _python(code, DEVICE_SECONDS)
  if error:
    return Devices("", (), error)
  return Devices(**json.loads(output))


def package_findings(found: Sequence[Package]) -> list[Finding]:
  """Returns what is missing, out of range, or does not fit together."""
  findings = []
  if version(PACKAGE) is None:
    findings.append(
      Finding(
        f"{PACKAGE} is not installed, so the tested versions are unknown."
        " Run `pip install -e .` in the checkout.",
        bad=False,
      )
    )
  for package in found:
    if package.ok or package.name == PACKAGE:
      continue
    have = package.version or "not installed"
    advice = f"Run `pip install '{package.name}{package.tested}'`."
    if package.name == "python":
      advice = "Make a new environment with such a Python."
    findings.append(
      Finding(
        f"{package.name}: {have}; tested with {package.tested or 'any'}."
        f" {advice}",
        bad=True,
      )
    )
  # What these pin themselves: jaxlib to jax, and a libtpu to jax.
  for owner in (package.name for package in found if package.name != PACKAGE):
    findings.extend(_pin_findings(owner))
  return findings


def _install(extra: str) -> str:
  """Returns the command for an extra; the package is not on PyPI."""
  return f'pip install -e ".[{extra}]"'


def _pin_findings(owner: str) -> list[Finding]:
  """Returns where an installed package is not the one that `owner` pins."""
  findings = []
  for requirement in requires(owner):
    have = version(requirement.name)
    extra = PLUGINS.get(requirement.name, "")
    if have is None or not _applies(requirement, extra):
      continue
    if requirement.specifier.contains(have, prereleases=True):
      continue
    why = ""
    if requirement.name == "libtpu":
      why = " jax.profiler crashes with another libtpu, on the CPU too."
    findings.append(
      Finding(
        f"{requirement.name}: {have}; {owner} {version(owner)} needs"
        f" {requirement.specifier}.{why}"
        f" Run `pip install '{requirement.name}{requirement.specifier}'`.",
        bad=True,
      )
    )
  return findings


def clashes() -> list[Finding]:
  """Returns which installed packages overwrite each other."""
  return [
    Finding(
      f"{first} and {second} are both installed and overwrite each other."
      f" Run `pip uninstall {first} {second}` and install the one you want.",
      bad=True,
    )
    for first, second in EXCLUSIVE
    if version(first) is not None and version(second) is not None
  ]


def device_findings(
  devices: Devices, *, nvidia: bool, tpu: bool
) -> list[Finding]:
  """Returns what is wrong between the devices and jax.

  Args:
    devices: what jax found.
    nvidia: whether the machine has an NVIDIA GPU.
    tpu: whether the machine has a TPU.
  """
  if devices.error:
    return [Finding(f"jax finds no device: {devices.error}", bad=True)]
  findings = []
  for there, name, extra in ((nvidia, "GPU", "cuda"), (tpu, "TPU", "tpu")):
    if not there or devices.backend != "cpu":
      continue
    if os.environ.get("JAX_PLATFORMS") == "cpu":
      text = f"JAX_PLATFORMS=cpu keeps jax off the {name} of this machine."
      findings.append(Finding(text, bad=False))
    else:
      findings.append(
        Finding(
          f"The machine has a {name}, but jax runs on the CPU."
          f" Run `{_install(extra)}` in the checkout.",
          bad=True,
        )
      )
  return findings


def tensorflow_findings(*, nvidia: bool) -> list[Finding]:
  """Returns whether TensorFlow would take the memory of a GPU from jax."""
  if not nvidia or version("tensorflow") is None:
    return []
  output, error = _python(_TENSORFLOW_PROBE, DEVICE_SECONDS)
  if error:
    return [Finding(f"TensorFlow does not start: {error}", bad=True)]
  if int(output) == 0:
    return []
  return [
    Finding(
      "TensorFlow sees the GPU and would take its memory from jax."
      " Run `pip uninstall tensorflow` and `pip install tensorflow-cpu`.",
      bad=True,
    )
  ]


def has_nvidia() -> bool:
  """Returns whether the machine has an NVIDIA GPU with a driver."""
  return pathlib.Path("/proc/driver/nvidia/version").exists() or (
    shutil.which("nvidia-smi") is not None
  )


def has_tpu() -> bool:
  """Returns whether the machine has a TPU of the kind that shows as a file."""
  return any(pathlib.Path("/dev").glob("accel[0-9]*"))


def version(name: str) -> str | None:
  """Returns the installed version of a distribution, or None."""
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def requires(name: str) -> list[requirements.Requirement]:
  """Returns what an installed distribution says it needs; [] if missing."""
  try:
    lines = importlib.metadata.requires(name) or []
  except importlib.metadata.PackageNotFoundError:
    return []
  return [requirements.Requirement(line) for line in lines]


def _metadata(name: str, field: str) -> list[str]:
  """Returns the values of a metadata field; [] if there is none."""
  try:
    return importlib.metadata.metadata(name).get_all(field) or []
  except importlib.metadata.PackageNotFoundError:
    return []


def _applies(requirement: requirements.Requirement, extra: str) -> bool:
  """Returns whether it is needed on this machine with `extra`."""
  marker = requirement.marker
  return marker is None or marker.evaluate({"extra": extra})


def _brought_by(name: str, extra: str) -> list[str]:
  """Returns what an extra adds to a distribution: jax[tpu] adds libtpu."""
  names = []
  for requirement in requires(name):
    if _applies(requirement, extra) and not _applies(requirement, ""):
      names.append(requirement.name)
      for inner in requirement.extras:
        names.extend(_brought_by(requirement.name, inner))
  return names


def _package(name: str, installed: str | None, tested: str) -> Package:
  ok = installed is not None and (
    specifiers.SpecifierSet(tested).contains(installed, prereleases=True)
  )
  return Package(name, installed, tested, ok)


def _python(code: str, seconds: float) -> tuple[str, str]:
  """Returns the last line a fresh Python prints, and what went wrong."""
  try:
    done = subprocess.run(
      [sys.executable, "-c", code],
      capture_output=True,
      text=True,
      timeout=seconds,
    )
  except subprocess.TimeoutExpired:
    return "", (
      f"no answer within {seconds:g} seconds; another process may hold the"
      " device."
    )
  if done.returncode != 0:
    lines = done.stderr.strip().splitlines()
    return "", lines[-1] if lines else f"exit code {done.returncode}"
  return done.stdout.strip().splitlines()[-1], ""


def _cores() -> int:
  if hasattr(os, "sched_getaffinity"):  # Linux: what we may use.
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _memory() -> dict[str, int]:
  """Returns /proc/meminfo in bytes; empty on other systems."""
  path = pathlib.Path("/proc/meminfo")
  if not path.exists():
    return {}
  pairs = re.findall(r"^(\w+):\s+(\d+) kB$", path.read_text(), re.MULTILINE)
  return {name: 1024 * int(kib) for name, kib in pairs}


def _gib(size: int) -> str:
  return f"{size / 2**30:.1f} GiB"


def _print(
  found: Sequence[Package],
  host: Mapping[str, str],
  devices: Devices,
  extras: Mapping[str, str],
  findings: Sequence[Finding],
) -> None:
  console = rich.console.Console(highlight=False)
  table = _table("package", "version", "tested", "")
  for package in found:
    mark = "ok" if package.ok else "missing" if not package.version else "BAD"
    _row(table, package.name, package.version or "-", package.tested, mark)
  console.print(table)

  table = _table("machine", "")
  for name, value in host.items():
    _row(table, name, value)
  for name, value in _device_rows(devices):
    _row(table, name, value)
  console.print(table)

  if extras:
    table = _table("optional, not installed", "to have it")
    for name, command in extras.items():
      _row(table, name, command)
    console.print(table)

  for finding in findings:
    label = "BAD" if finding.bad else "note"
    console.print(rich.text.Text(f"{label}: {finding.text}"), soft_wrap=True)
  if not any(finding.bad for finding in findings):
    console.print("No known problem.")


def _device_rows(devices: Devices) -> list[tuple[str, str]]:
  if devices.error:
    return [("devices", "none")]
  rows = [("devices", f"{len(devices.devices)} x {devices.backend}")]
  for device in devices.devices:
    limit, used = device["bytes_limit"], device["bytes_in_use"]
    memory = f", {_gib(used or 0)} of {_gib(limit)} in use" if limit else ""
    rows.append((f"device {device['id']}", f"{device['kind']}{memory}"))
  return rows


def _table(*columns: str) -> rich.table.Table:
  table = rich.table.Table(box=rich.box.ROUNDED)
  for column in columns:
    table.add_column(column, overflow="fold")
  return table


def _row(table: rich.table.Table, *cells: str) -> None:
  table.add_row(*map(rich.text.Text, cells))


if __name__ == "__main__":
  sys.exit(main())
