"""Images in files: what is left when every host that held a copy is gone.

These are the names that the rest of the package uses.
"""

from lmres.gemini.edge.durable_manifest import run_folder
from lmres.gemini.edge.durable_read import DurableImage, Pruned, Scanned, open_part, prune, read_part, scan
from lmres.gemini.edge.durable_write import Span, Written, write_image

__all__ = [
    "DurableImage",
    "Pruned",
    "Scanned",
    "Span",
    "Written",
    "open_part",
    "prune",
    "read_part",
    "run_folder",
    "scan",
    "write_image",
]
