"""The page itself: template, style and script put together into one HTML file that needs nothing else.

Names, labels and settings are text that others wrote. The template escapes all of it, the script only ever sets it as
text, and the page's own policy lets nothing run but that script and nothing load but its pictures.
"""

import base64
import hashlib
from importlib import resources
from typing import Any

from semclust import __version__

SCRIPTS = ("pictures.js", "gallery.js", "map.js", "curves.js")
GENERATOR = '<meta name="generator" content="semclust'


def render(content: dict[str, Any]) -> bytes:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("semclust.report", "web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Nothing that JSON does not know may slip into the script's data: a page that shows nothing helps no one.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    folder = resources.files("semclust.report").joinpath("web")
    style = folder.joinpath("style.css").read_text(encoding="utf-8")
    script = "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    policy = (
        f"default-src 'none'; img-src blob: data:; style-src {allow(style)}; script-src {allow(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    page = environment.get_template("page.html").render(
        **content, style=style, script=script, policy=policy, version=__version__
    )
    return page.encode("utf-8")


def allow(text: str) -> str:
    """How a content security policy names one style or script: by the hash of its text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode()}'"
