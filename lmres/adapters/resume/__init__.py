"""Bringing an unchanged program back to its exact step: what is read, skipped, replayed and compared. See README.md."""
