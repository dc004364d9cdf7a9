"""Which files look like images, judged by their names: read, known but unsupported, or no images at all."""

from __future__ import annotations

import importlib.util
from functools import cache

_IMAGES = """
    jpg jpeg jpe jfif png apng webp gif bmp dib tif tiff avif jp2 j2k jpf jpx jpc j2c ppm pgm pbm pnm tga icb vda vst
    ico icns cur pcx dcx dds sgi rgb rgba bw ras im msp pcd psd pxr xbm xpm blp fit fits fli flc ftc ftu
"""
_RAW = "dng cr2 cr3 crw nef nrw arw srf sr2 raf orf rw2 pef srw x3f 3fr iiq erf kdc mrw"
_OTHER = "jxl svg svgz eps ps wmf emf exr hdr"
IMAGE_SUFFIXES = frozenset(f".{suffix}" for suffix in _IMAGES.split())
"""Image files that Pillow reads; those that `datasets` reads, except vector graphics and video."""
_HEIF_SUFFIXES = frozenset({".heic", ".heif", ".hif"})
UNSUPPORTED_SUFFIXES = _HEIF_SUFFIXES | {f".{suffix}" for suffix in (_RAW + " " + _OTHER).split()}
"""Image files that need another package or a conversion."""
_SYSTEM_NAMES = frozenset(
    {"Thumbs.db", "ehthumbs.db", "desktop.ini", "Icon\r", "__MACOSX", "__pycache__", "@eaDir", "$RECYCLE.BIN"}
    | {"System Volume Information", "lost+found"}
)


@cache
def readable_suffixes() -> frozenset[str]:
    """Return the suffixes of files that can be decoded here, in lower case; HEIC if pillow-heif is installed."""
    return IMAGE_SUFFIXES | _HEIF_SUFFIXES if importlib.util.find_spec("pillow_heif") else IMAGE_SUFFIXES


def suffix_of(name: str) -> str:
    """Return the suffix of a file name in lower case, with its dot; empty if there is none."""
    dot = name.rfind(".")
    return name[dot:].lower() if dot > 0 else ""


def is_system_file(name: str) -> bool:
    """Return whether a file or directory is hidden, or is written by the operating system."""
    return name.startswith(".") or name in _SYSTEM_NAMES


def how_to_read(suffix: str) -> str:
    """Return advice on an unsupported kind of image: `install pillow-heif`; empty if there is none."""
    if suffix in _HEIF_SUFFIXES:
        return "install pillow-heif"
    return "convert to JPEG or PNG" if suffix in UNSUPPORTED_SUFFIXES else ""
