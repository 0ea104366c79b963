"""What a child must not find half done: a trainer is forked by its DataLoaders at any time."""
