"""One page to look at: ``write_report`` makes report.html of a run folder.

kept.py            what only the end of a fit knows: thumbnails, places on the map, labels
pictures.py        thumbnails in sheets
places.py          t-SNE
content.py         from the run folder to all that the page shows
against_labels.py  right and wrong, the confusion table
close.py           which clusters could be merged
curves.py          the course of the training
settings_table.py  every setting with its description, and the command that repeats the run
page.py            template, style and script, which lie in web/
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from semclust.assignments import Assignments, read_assignments
from semclust.config import Settings
from semclust.data import Images, open_images
from semclust.errors import InputError, SemclustError
from semclust.groups import Groups
from semclust.report.content import collect, read_settings
from semclust.report.kept import FILE, Kept, add_pictures, choose_gallery, keep, read_kept, write_kept
from semclust.report.page import GENERATOR, render
from semclust.run_folder import RunFolder, fingerprint
from semclust.storage import check_new_file, write_whole
from semclust.truth import read_labels

__all__ = ["shows", "write_report"]


def write_report(run_folder: str | Path, out: str | Path | None = None, images: Images | None = None) -> Path:
    """Write the page of a finished run and return its path.

    out: another file than report.html in the run folder; one that exists is never overwritten.
    images: those of the run, where they are at hand. They are needed once, for the thumbnails: later reports work
        from the run folder alone. Where they are not given, they are looked for where the fit found them.
    """
    run = RunFolder.open(Path(run_folder))
    path = check_place(run, None if out is None else Path(out))
    assigned = read_assignments(run.assignments)
    if images is None and (run.path / FILE).exists():
        kept = read_kept(run.path / FILE, len(assigned.names))
        renew_pictures(run, assigned, kept)
    else:
        kept = keep_now(run, assigned, images)
    write_whole(path, render(collect(run, assigned, kept)))
    return path


def keep_now(run: RunFolder, assigned: Assignments, images: Images | None) -> Kept:
    config, settings = read_settings(run)
    return keep(run, settings, images or find_images(config, settings), assigned.cluster, assigned.confidence)


def renew_pictures(run: RunFolder, assigned: Assignments, kept: Kept) -> None:
    """Once clusters were merged or a merge was undone, others are their most and least certain images: make thumbnails
    of those, where the images are still at hand. Otherwise some of them are shown by their names."""
    config, settings = read_settings(run)
    _, gallery = choose_gallery(assigned.cluster, assigned.confidence, settings.n_clusters)
    if kept.sheets is None or np.isin(gallery, kept.pictured).all():
        return
    images = find_images(config, settings)
    if images is not None:
        add_pictures(kept, images.pixels, gallery)
        write_kept(run.path / FILE, kept)


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


def check_place(run: RunFolder, out: Path | None) -> Path:
    """Where to write; an InputError where something else would be lost."""
    if out is None:
        page = run.path / "report.html"
        if page.exists() and GENERATOR not in head_of(page):
            raise InputError(f"{str(page)!r} was not written by semclust and is not overwritten; choose an --out.")
        return page
    check_new_file(out)
    return out


def shows(run: RunFolder, groups: Groups) -> bool:
    """Whether report.html shows the clusters of the run as they are: after a step that was taken back, it may."""
    return f'<meta name="clusters" content="{groups.fingerprint}">' in head_of(run.path / "report.html")


def head_of(page: Path) -> str:
    with open(page, "rb") as file:
        return file.read(2000).decode(errors="replace")
