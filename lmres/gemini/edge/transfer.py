"""Parts between vaults: pulled by digest, for copies and for restoring alike.

These are the names that the rest of the package uses.
"""

from lmres.gemini.edge.transfer_client import Pulled, Puller, PullLimits, pull
from lmres.gemini.edge.transfer_server import Lookup, PartServer, PartSource, ServerLimits

__all__ = ["Lookup", "PartServer", "PartSource", "PullLimits", "Pulled", "Puller", "ServerLimits", "pull"]
