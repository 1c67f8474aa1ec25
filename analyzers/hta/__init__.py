"""Critical path, launch statistics, idle causes and trace diff by HolisticTraceAnalysis."""
