"""The doctor: what it finds, and that it never falls over itself."""

import importlib
import json
import platform
import subprocess
import sys

import pytest

from vit_jax import doctor

GPU = doctor.Devices("gpu", ({"id": 0, "platform": "gpu"},))
CPU = doctor.Devices("cpu", ({"id": 0, "platform": "cpu"},))


@pytest.fixture
def install(tmp_path, monkeypatch):
  """Returns a function that installs a package into an empty environment."""
  site = tmp_path / "site"
  site.mkdir()
  monkeypatch.setattr(sys, "path", [str(site)])

  def install(name, version, *requires, extras=(), python=">=3.11"):
    lines = [
      f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
      f"Requires-Python: {python}",
      *(f"Requires-Dist: {line}" for line in requires),
      *(f"Provides-Extra: {extra}" for extra in extras),
    ]
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    importlib.invalidate_caches()

  yield install
  importlib.invalidate_caches()


@pytest.fixture
def healthy(install):
  """Installs what is needed, in versions that fit."""
  needs = [f"{name}<2,>=1" for name in doctor.CORE]
  install(
    "vit_jax",
    "0.1.0",
    *needs,
    'tensorflow>=2.20; extra == "tf"',
    'jax[cuda12]; extra == "cuda"',
    extras=("tf", "cuda"),
  )
  for name in set(doctor.CORE) - {"jax"}:
    install(name, "1.5")
  return install


JAX_PINS = (
  "jaxlib<=1.5,>=1.5",
  'jaxlib==1.4; extra == "ci"',
  'libtpu==0.0.42.*; extra == "tpu"',
  'jax-cuda12-plugin<=1.5,>=1.5; extra == "cuda12"',
)


def texts(findings: list[doctor.Finding]) -> list[str]:
  return [finding.text for finding in findings if finding.bad]


def package_texts() -> list[str]:
  return texts(doctor.package_findings(doctor.packages()))


def test_the_tested_ranges_are_those_of_the_installed_metadata(healthy):
  healthy("jax", "1.5", *JAX_PINS)
  by_name = {package.name: package for package in doctor.packages()}
  assert by_name["jax"] == doctor.Package("jax", "1.5", "<2,>=1", True)
  assert by_name["python"].tested == ">=3.11"
  assert by_name["python"].version == platform.python_version()
  assert "tensorflow" not in by_name  # Only with an extra.
  assert package_texts() == []


def test_a_version_out_of_range_is_bad_and_says_what_to_run(healthy):
  healthy("jax", "3.0")
  assert package_texts() == [
    "jax: 3.0; tested with <2,>=1. Run `pip install 'jax<2,>=1'`."
  ]


def test_a_missing_package_is_bad(healthy):
  assert package_texts() == [
    "jax: not installed; tested with <2,>=1. Run `pip install 'jax<2,>=1'`."
  ]


@pytest.mark.parametrize(
  ("name", "version", "why"),
  [
    ("libtpu", "0.0.52", "jax.profiler crashes"),
    ("jax-cuda12-plugin", "1.4", "needs <=1.5,>=1.5"),
  ],
)
def test_a_plugin_that_jax_does_not_pin_is_bad(healthy, name, version, why):
  healthy("jax", "1.5", *JAX_PINS)
  healthy(name, version)
  (text,) = package_texts()
  assert text.startswith(f"{name}: {version}; jax 1.5 needs") and why in text


def test_jaxlib_of_another_version_than_jax_is_bad(healthy):
  healthy("jax", "1.6", "jaxlib<=1.6,>=1.6")
  assert package_texts() == [
    "jaxlib: 1.5; jax 1.6 needs <=1.6,>=1.6."
    " Run `pip install 'jaxlib<=1.6,>=1.6'`."
  ]


def test_an_old_python_is_bad(install):
  install("vit_jax", "0.1.0", python=">=4")
  for name in doctor.CORE:
    install(name, "1.5")
  (text,) = package_texts()
  assert f"python: {platform.python_version()}; tested with >=4." in text
  assert "pip" not in text


def test_a_checkout_that_is_not_installed_is_a_note(install):
  for name in doctor.CORE:
    install(name, "1.5")
  (finding,) = doctor.package_findings(doctor.packages())
  assert not finding.bad and "Run `pip install -e .`" in finding.text


def test_packages_that_overwrite_each_other_are_bad(install):
  install("opencv-python", "5.0")
  assert doctor.clashes() == []
  install("opencv-python-headless", "5.0")
  (text,) = texts(doctor.clashes())
  assert "pip uninstall opencv-python opencv-python-headless" in text


def test_missing_extras_come_with_the_command(healthy):
  healthy("jax", "1.5", *JAX_PINS)
  assert doctor.missing_extras() == {
    "tf (tensorflow)": 'pip install -e ".[tf]"',
    "cuda (jax-cuda12-plugin)": 'pip install -e ".[cuda]"',
    "gcsfs": "pip install 'etils[epath-gcs]'",
  }
  healthy("tensorflow", "2.21")
  healthy("jax-cuda12-plugin", "1.5")
  healthy("gcsfs", "2026.1")
  assert doctor.missing_extras() == {}


def test_a_gpu_that_jax_does_not_use_is_bad_unless_asked_for(monkeypatch):
  monkeypatch.delenv("JAX_PLATFORMS", raising=False)
  (text,) = texts(doctor.device_findings(CPU, nvidia=True, tpu=False))
  assert "has a GPU" in text and 'pip install -e ".[cuda]"' in text
  (text,) = texts(doctor.device_findings(CPU, nvidia=False, tpu=True))
  assert "has a TPU" in text and 'pip install -e ".[tpu]"' in text
  assert doctor.device_findings(GPU, nvidia=True, tpu=False) == []
  assert doctor.device_findings(CPU, nvidia=False, tpu=False) == []
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  (note,) = doctor.device_findings(CPU, nvidia=True, tpu=False)
  assert not note.bad and "JAX_PLATFORMS=cpu" in note.text


@pytest.mark.parametrize(
  ("code", "seconds", "why"),
  [
    ("raise RuntimeError('no backend')", 60, "RuntimeError: no backend"),
    ("import os; os.abort()", 60, "exit code -6"),
    ("import time; time.sleep(60)", 0.2, "no answer within 0.2 seconds"),
  ],
)
def test_a_backend_that_fails_is_a_finding(monkeypatch, code, seconds, why):
  monkeypatch.setattr(doctor, "DEVICE_SECONDS", seconds)
  devices = doctor.probe_devices(code)
  assert devices.devices == () and why in devices.error
  (text,) = texts(doctor.device_findings(devices, nvidia=True, tpu=False))
  assert text.startswith("jax finds no device: ") and why in text


@pytest.mark.parametrize(
  ("gpus", "said"), [("0", None), ("1", "sees the GPU"), ("x", "not start")]
)
def test_tensorflow_that_sees_the_gpu_is_bad(install, monkeypatch, gpus, said):
  code = f"print(int('{gpus}'))"
  monkeypatch.setattr(doctor, "_TENSORFLOW_PROBE", code)
  assert doctor.tensorflow_findings(nvidia=True) == []  # Not installed.
  install("tensorflow", "2.21")
  assert doctor.tensorflow_findings(nvidia=False) == []
  found = texts(doctor.tensorflow_findings(nvidia=True))
  assert [said in text for text in found] == ([True] if said else [])


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str]:
  code = doctor.main(arguments)
  return code, capsys.readouterr().out


def test_the_table_names_device_memory_and_the_worst_comes_last(
  monkeypatch, capsys
):
  device = {"id": 3, "platform": "gpu", "kind": "H200 [x]"}
  memory = {"bytes_in_use": 2**30, "bytes_limit": 100 * 2**30}
  devices = doctor.Devices("gpu", ({**device, **memory},))
  monkeypatch.setattr(doctor, "probe_devices", lambda: devices)
  bad = [doctor.Finding("broken", bad=True)]
  monkeypatch.setattr(doctor, "clashes", lambda: bad)
  monkeypatch.setattr(doctor, "tensorflow_findings", lambda **_: [])
  code, text = run(monkeypatch, capsys)
  assert code == 1
  assert "H200 [x], 1.0 GiB of 100.0 GiB in use" in text
  assert text.rstrip().endswith("BAD: broken")


def test_the_command_examines_this_machine():
  done = subprocess.run(
    [sys.executable, "-m", "vit_jax.doctor", "--json"],
    capture_output=True,
    text=True,
    check=False,
  )
  found = json.loads(done.stdout)
  bad = [finding for finding in found["findings"] if finding["bad"]]
  assert done.returncode == (1 if bad else 0)
  assert found["ok"] == (not bad)
  assert found["devices"]["backend"] == "cpu"
  assert int(found["host"]["cpu cores"]) >= 1
  assert {"jax", "jaxlib", "flax"} <= {p["name"] for p in found["packages"]}
