"""Typed configuration: loads the file and the environment, reports all problems at once, reloads and watches
the file.

Import names from the modules. `model` has all sections, those of the present features included, so the
sections of a feature must not import it at their start.
"""
