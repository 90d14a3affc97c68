"""A program that does nothing but live: for what the agents themselves cost and take."""

import os
import time

print("life", os.environ["RANK"], os.getpid(), time.time(), flush=True)
while True:
    time.sleep(60)
