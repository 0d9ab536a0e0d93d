"""The main job: a small mixture of experts, trained on real text."""
