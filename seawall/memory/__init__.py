"""Byte arithmetic of the engine: footprints, the plan, the ledger and the report. Never torch."""
