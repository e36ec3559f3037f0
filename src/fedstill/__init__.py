"""fedstill"""
