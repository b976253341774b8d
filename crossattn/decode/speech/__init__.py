"""Speech to text with Whisper: windows, long recordings, and when each word was said."""
