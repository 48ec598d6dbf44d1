"""The server: the command line, HTTP and WebSocket, the protocol, and the process that runs the engine.

    cli ──starts──▶ ws ──frames──▶ protocol (no I/O) ──Request──▶ engine/supervisor ══socket══▶ engine/worker
                    ◀──frames──            ◀──StepOutput──                        ◀═══════

Everything left of the double line is one process that never imports torch; the engine is the other.
"""
