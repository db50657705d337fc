/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which way a stream of reads goes: a majority vote over its last moves, as in Leap (Al Maruf and
 * Chowdhury, ATC '20). No clock, no lock, no engine.
 */
#ifndef ISWI_STATE_TREND_H
#define ISWI_STATE_TREND_H

#include <stdint.h>

/* Requests that follow one another, each near the one before. Zeroed: none yet. */
struct iswi_stream {
	uint64_t page, end;     /* of its last request */
	uint64_t ahead;         /* read ahead up to here, in the direction of the trend */
	uint32_t forward, back; /* the last 32 moves, the newest in the lowest bit */
	uint32_t moves;         /* how many of these there are */
	uint32_t used;          /* when it was last */
	int trend;              /* 1, -1, or 0: none */
};

/* The stream that a request for [page, end) belongs to, which now includes it. */
struct iswi_stream *iswi_trend_note(struct iswi_stream *streams, uint32_t count, uint32_t now,
				    uint64_t page, uint64_t end);

#endif
