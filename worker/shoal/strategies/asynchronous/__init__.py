"""Members at their own pace, over the parameter servers."""
