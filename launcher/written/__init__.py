"""Texts as a person wrote them: in a YAML file, and in an override of the command line."""
