"""Run one engine in real time: its process or thread, clock, device threads and watchdog.

`session_server.engine` decides what one step does and knows no clock, thread or socket. This
package holds all of those.
"""
