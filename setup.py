import platform
from pathlib import Path

from setuptools import Extension, find_packages, setup

# Supported version ranges, with reasons in tests/test_package.py; constraints.txt pins the tested versions.
REQUIRES = [
    "torch>=2.8",
    "torchvision>=0.23",
    "timm>=1.0.15",
    "accelerate>=1.6",
    "deepspeed>=0.19; platform_system == 'Linux'",
    "transformers>=4.50; platform_system == 'Linux'",  # accelerate checks its version before using DeepSpeed
    "datasets>=3.0",
    "pyarrow>=15.0",
    "huggingface_hub>=0.26",
    "wandb>=0.19",
    "safetensors>=0.5",
    "numpy>=1.26",
    "pillow>=11",
    "simplejpeg>=1.8",  # JPEG decoding at reduced size, faster than Pillow
    "PyYAML>=6.0",
    "pydantic>=2.9",
    "psutil>=5.9",
    "packaging>=23.0",
    "filelock>=3.13",
    "tqdm>=4.66",
    "rich>=13.7",
    "scikit-learn>=1.4",  # embedded digits dataset
    "jinja2>=3.1",  # templates of the run page and the sweep page
    "matplotlib>=3.8",  # figures: confusion matrix, attention
    "optuna>=4.0",  # local sweeps
]
HEIF = ["pillow-heif>=0.20"]  # HEIC photographs
EXPORT = ["onnx>=1.17", "onnxscript>=0.3", "onnxruntime>=1.20"]
# selenium drives the system's Chromium; tensorboard is one of accelerate's trackers; peft adds LoRA layers to models;
# scikit-image ships photographs.
TEST = [
    "pytest>=8.0",
    "pytest-xdist>=3.5",
    "selenium>=4.20",
    "tensorboard>=2.17",
    "peft>=0.15",
    "scikit-image>=0.22",
    *EXPORT,
]
DEV = ["ruff>=0.9", "mypy>=1.14", "types-PyYAML"]

# CPU attention kernels, compiled once per instruction set. Skipped without a compiler; torch's kernel is used then.
VECTORS = {"avx2": ["-mavx2", "-mfma"], "avx512": ["-mavx512f", "-mfma"]}
KERNELS = [
    Extension(
        f"vit_scale.kernels.cpu_attention_{name}",
        ["vit_scale/kernels/cpu_attention.c", "vit_scale/kernels/cpu_linear_attention.c"],
        depends=["vit_scale/kernels/cpu_vectors.h"],
        extra_compile_args=["-O3", "-std=gnu11", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", *flags],
        libraries=["m"],
        optional=True,
    )
    for name, flags in VECTORS.items()
]

setup(
    name="vit_scale",
    version="0.1.0",
    description="Train Vision Transformers from a single CPU to many GPU nodes, with one recipe and the same losses.",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["vit_scale", "vit_scale.*"]),
    package_data={
        "vit_scale": ["py.typed"],
        "vit_scale.charts": ["assets/*"],
        "vit_scale.page": ["assets/*"],
        "vit_scale.sweep": ["assets/*"],
    },
    ext_modules=KERNELS if (platform.system(), platform.machine()) == ("Linux", "x86_64") else [],
    entry_points={"console_scripts": ["vit-scale = vit_scale.cli:main"]},
    install_requires=REQUIRES,
    extras_require={"heif": HEIF, "export": EXPORT, "test": TEST, "dev": TEST + DEV},
)
