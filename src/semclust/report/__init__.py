"""One page to look at: ``write_report`` makes report.html of a run folder.

kept.py            what only the end of a fit knows: thumbnails, places on the map, labels
pictures.py        thumbnails in sheets
places.py          t-SNE
collect.py         from the run folder to all that the page shows
against_labels.py  right and wrong, the confusion table
close.py           which clusters could be merged
curves.py          the course of the training
settings_table.py  every setting with its description, and the command that repeats the run
page.py            template, style and script, which lie in web/
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from semclust.config import Settings
from semclust.data import Images, open_images
from semclust.errors import InputError, SemclustError
from semclust.report.content import Assignments, collect, read_columns, read_settings
from semclust.report.kept import FILE, Kept, keep, read_kept
from semclust.report.page import GENERATOR, render
from semclust.run_folder import RunFolder, fingerprint
from semclust.storage import write_whole
from semclust.truth import read_labels

__all__ = ["write_report"]


def write_report(run_folder: str | Path, out: str | Path | None = None, images: Images | None = None) -> Path:
    """Write the page of a finished run and return its path.

    out: another file than report.html in the run folder; one that exists is never overwritten.
    images: those of the run, where they are at hand. They are needed once, for the thumbnails: later reports work
        from the run folder alone. Where they are not given, they are looked for where the fit found them.
    """
    run = RunFolder.open(Path(run_folder))
    path = check_free(run, None if out is None else Path(out))
    assigned = read_columns(run)
    if images is None and (run.path / FILE).exists():
        kept = read_kept(run.path / FILE, len(assigned.names))
    else:
        kept = keep_now(run, assigned, images)
    write_whole(path, render(collect(run, assigned, kept)))
    return path


def keep_now(run: RunFolder, assigned: Assignments, images: Images | None) -> Kept:
    config, settings = read_settings(run)
    return keep(run, settings, images or find_images(config, settings), assigned.cluster, assigned.confidence)


def find_images(config: dict[str, Any], settings: Settings) -> Images | None:
    """The images of a run where the fit found them; None if they are gone or have changed."""
    try:
        images = open_images(config["data"], size=settings.image_size)
        if fingerprint(images.pixels, images.names) != config["fingerprint"]:
            return None
    except (SemclustError, KeyError, OSError):
        return None
    if config.get("labels"):
        with suppress(SemclustError, OSError):  # pictures are worth having without them
            images.labels = read_labels(config["labels"], images.names)
    return images


def check_free(run: RunFolder, out: Path | None) -> Path:
    """Where to write; an InputError where something else would be lost."""
    if out is None:
        page = run.path / "report.html"
        if page.exists() and GENERATOR.encode() not in page.read_bytes()[:2000]:
            raise InputError(f"{str(page)!r} was not written by semclust and is not overwritten; choose an --out.")
        return page
    if out.exists() or out.is_symlink():
        raise InputError(f"{str(out)!r} exists and is not overwritten; choose another --out.")
    if not out.parent.is_dir():
        raise InputError(f"There is no folder {str(out.parent)!r} for --out; make it, or choose another.")
    return out
