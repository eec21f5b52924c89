"""Tar files in WebDataset's layout, read by index: where each member lies is found once, and nothing is unpacked.

An image is a member with the ending of one; its label, for evaluation, stands in the member with the same key (the name
up to the first dot) and the ending .cls. A member's name is only text: no path is made of it.
"""

import hashlib
import os
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from semclust import cache
from semclust.decoding import SUFFIXES, Place, pixels_depend_on, reason
from semclust.errors import InputError
from semclust.pictures import picture_source
from semclust.sources import Source
from semclust.truth import WHOLE_NUMBER, as_labels

COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
LONGEST_LABEL = 1000  # bytes
LARGEST_OFFSET = 2**62


def is_shard(path: str) -> bool:
    return path.lower().endswith((".tar", *COMPRESSED))


def shard_source(paths: list[str]) -> Source:
    """The images in all ``paths``, one tar after the other."""
    for path in paths:
        if path.lower().endswith(COMPRESSED):
            raise InputError(f"{path!r} is compressed, so it cannot be read by index; decompress it to a .tar first.")
        if not os.path.isfile(path):
            raise InputError(f"There is no tar file {path!r}; {len(paths)} were named in all.")
    base = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    names: list[str] = []
    labels: list[int | str | None] = []
    unlisted: list[tuple[str, str]] = []
    spans: list[np.ndarray] = []  # of each tar, offset and length of its images
    stamps: list[str] = []
    for path in paths:
        title = Path(os.path.relpath(path, base)).as_posix()
        stamp, index = _index(path)
        stamps.append(stamp)
        names += [f"{title}/{name}" for name in index["names"]]
        labels += index["labels"]
        unlisted += [(f"{title}/{name}" if name else title, why) for name, why in index["unlisted"]]
        spans.append(np.array([index["offsets"], index["lengths"]], np.int64).T)
    if not names:
        also = f" Problems: {unlisted[:3]}." if unlisted else ""
        raise InputError(f"No member of {', '.join(map(repr, paths[:3]))} ends in {', '.join(SUFFIXES)}.{also}")
    first = np.cumsum([0, *map(len, spans)])  # image where each tar begins

    def places(start: int, stop: int) -> list[Place]:
        found: list[Place] = []
        for image in range(start, stop):
            shard = int(np.searchsorted(first, image, "right")) - 1
            offset, length = spans[shard][image - first[shard]].tolist()
            found.append((os.path.abspath(paths[shard]), offset, length))
        return found

    about = repr((pixels_depend_on(), stamps, first.tolist()))  # how many are found in a damaged tar may change
    return picture_source(
        re.sub(r"[^\w.-]+|[-_.]*\d+$", "", Path(paths[0]).stem) or "shards",
        names,
        places,
        labels=as_labels(labels),
        unlisted=unlisted,
        stamp=hashlib.sha256(about.encode()).hexdigest()[:40],
    )


def _index(path: str) -> tuple[str, dict[str, Any]]:
    """Stamp of a tar, and where its images lie: from the cache, or by going through it once."""
    status = os.stat(path)
    known = repr((os.path.abspath(path), status.st_size, status.st_mtime_ns))
    stamp = hashlib.sha256(known.encode("utf-8", "surrogateescape")).hexdigest()[:40]
    index = cache.find_json(stamp)
    if index is None or not _is_index(index):
        index = _scan(path)
        if all(name for name, _ in index["unlisted"]):  # a tar that cannot be read to its end may be so next time
            cache.keep_json(stamp, index)
    return stamp, index


def _is_index(value: dict[str, Any]) -> bool:
    """Whether ``value`` is what ``_scan`` gives, as far as the rest depends on it."""
    kinds: dict[str, Any] = {"names": str, "offsets": int, "lengths": int, "labels": (int, str, type(None))}
    columns: list[Any] = [value.get(key) for key in kinds]
    unlisted = value.get("unlisted")
    return (
        all(isinstance(column, list) for column in columns)
        and len({len(column) for column in columns}) == 1
        and all(isinstance(item, kind) for key, kind in kinds.items() for item in value[key])
        and isinstance(unlisted, list)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in unlisted)
    )


def _scan(path: str) -> dict[str, Any]:
    names: list[str] = []
    offsets: list[int] = []
    lengths: list[int] = []
    unlisted: list[tuple[str, str]] = []
    classes: dict[str, int | str] = {}
    try:
        with tarfile.open(path, "r:", errors="surrogateescape") as tar:
            try:
                while member := tar.next():
                    tar.members = []  # type: ignore[attr-defined]  # would otherwise grow with the file
                    if not 0 <= member.size <= LARGEST_OFFSET - member.offset_data:  # below 0, it would lead back
                        raise tarfile.ReadError(f"a member of {member.size} bytes")
                    name = re.sub(r"^(\./)+", "", member.name)
                    ending = os.path.splitext(name)[1].lower()
                    if _is_hidden(name) or (ending not in SUFFIXES and ending != ".cls"):
                        continue
                    if not member.isreg() or member.issparse():
                        if ending != ".cls" and not member.isdir():
                            unlisted.append((name, "not a regular file"))
                    elif ending == ".cls":
                        classes[_key(name)] = _label(tar, member)
                    else:
                        names.append(name)
                        offsets.append(member.offset_data)
                        lengths.append(member.size)
                if not _only_zeros_from(tar.offset, tar.fileobj):  # tarfile takes a damaged header for the end
                    raise tarfile.ReadError(f"no member begins at byte {tar.offset}")
            # ValueError: of an offset beyond all files; MemoryError: of a header that claims more than the memory
            except (tarfile.TarError, OSError, ValueError, MemoryError) as error:
                unlisted.append(("", f"the tar file is cut off or damaged: {reason(error)}"))
    except (tarfile.TarError, OSError, MemoryError) as error:
        raise InputError(f"{path!r} cannot be read as a tar file ({reason(error)}); make it again.") from error
    labels = [classes.get(_key(name)) for name in names]
    return {"names": names, "offsets": offsets, "lengths": lengths, "labels": labels, "unlisted": unlisted}


def _only_zeros_from(offset: int, file: Any) -> bool:
    file.seek(offset)
    return all(piece.count(0) == len(piece) for piece in iter(lambda: file.read(cache.PIECE), b""))


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") and part not in (".", "..") for part in name.split("/"))


def _key(name: str) -> str:
    folder, _, base = name.rpartition("/")
    return f"{folder}/{base.split('.', 1)[0]}"


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo) -> int | str:
    content = tar.extractfile(member)
    text = content.read(LONGEST_LABEL).decode("utf-8", "replace").strip() if content else ""
    return int(text) if WHOLE_NUMBER.fullmatch(text) else text
