"""Fakes that several test files share."""
