"""Decides what each step computes; owns every request and every lease."""
