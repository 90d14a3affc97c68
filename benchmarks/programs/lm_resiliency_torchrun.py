"""torchrun with the backend of the lm-resiliency package put into torch's registry by hand: the entry point of its
version 0.2.0 fails with torch 2.13, which expects a function that returns the creator."""

from lm_resiliency.integrations.torchrun import create_rendezvous_handler
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.run import main

rendezvous_handler_registry.register("lm_resiliency", create_rendezvous_handler)
main()
