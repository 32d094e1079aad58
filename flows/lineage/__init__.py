"""From a model back to its data, and the same result again."""
