"""Speech to text with Whisper: windows, long recordings, and word times."""
