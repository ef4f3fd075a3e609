"""Attacks on files, checkpoints and processes; each must end in a refusal or in the right answer."""
