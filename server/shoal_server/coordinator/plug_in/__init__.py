"""Interface and options of the plug-in for jobs with parameters on servers."""
