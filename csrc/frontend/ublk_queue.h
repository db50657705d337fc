/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One queue of a ublk device: a thread that owns an io_uring, by which the kernel hands requests
 * over and takes their results back. The thread submits requests to the engine; the engine ends
 * them on its own threads, which put them into a list and wake the owner, once per batch.
 */
#ifndef ISWI_UBLK_QUEUE_H
#define ISWI_UBLK_QUEUE_H

#include <liburing.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "frontend/ublk_request.h"

/* In this order, each once; ENDED may follow any. */
enum iswi_ublk_phase {
	ISWI_UBLK_STARTING, /* the thread makes its ring */
	ISWI_UBLK_PARKED,   /* has it, and waits for iswi_ublk_queue_order */
	ISWI_UBLK_FETCHING, /* every tag is the kernel's: the device may be started */
	ISWI_UBLK_ENDED,    /* the ring is closed */
};

struct iswi_ublk_queue {
	isw_engine *engine; /* NULL: every request is answered with EIO */
	uint16_t number;
	uint16_t depth;
	uint32_t request_bytes;
	/* Once, on the queue's thread, when it ends without having been told to. Must not wait. */
	void (*down)(void *ctx, int error);
	void *ctx;

	struct iswi_ublk_tag *tags;
	char *buffers;     /* depth of request_bytes each, page aligned */
	int wake_fd;       /* eventfd: how many batches of ended requests were announced */
	pthread_t started; /* for join, if has_thread */
	bool has_thread;
	struct iswi_ublk_ended ended;

	pthread_mutex_t lock; /* guards the next four */
	pthread_cond_t changed;
	enum iswi_ublk_phase phase;
	int error; /* why it ended */
	bool ordered, quit;

	/* Set by iswi_ublk_queue_order before ordered. */
	int device_fd; /* borrowed: /dev/ublkcN */
	const struct ublksrv_io_desc *descs;

	pthread_t thread; /* itself; set before the first request, so that they may compare */

	/* The thread's own. */
	struct io_uring ring;
	struct iswi_plug plug;
	uint32_t live;      /* tags that the kernel has not given up */
	uint32_t busy;      /* of them in the engine, or on their way back */
	uint32_t batches;   /* taken whose announcement has to come, modulo 2^32 */
	uint32_t announced; /* announcements read, modulo 2^32 */
	int failed;         /* the first command that was refused: -errno of that, else 0 */
	uint64_t wake_value;
	bool wake_armed, stopping;
};

/*
 * Makes buffers and thread; engine, number, depth, request_bytes, down and ctx are set, the rest
 * is zero. The ring is made on the thread: iswi_ublk_queue_wait for PARKED says how that went.
 */
int iswi_ublk_queue_start(struct iswi_ublk_queue *queue);
/* Waits until it is so far. 0, or why it ended before. */
int iswi_ublk_queue_wait(struct iswi_ublk_queue *queue, enum iswi_ublk_phase phase);
/* Begins to fetch from the device. device_fd and descs must stay until the queue has ended. */
void iswi_ublk_queue_order(struct iswi_ublk_queue *queue, int device_fd,
			   const struct ublksrv_io_desc *descs);
/*
 * The thread takes nothing more once the engine has ended what it has, and closes its ring; waits
 * for that.
 */
void iswi_ublk_queue_stop(struct iswi_ublk_queue *queue);
/* Stopped before, or never started. */
void iswi_ublk_queue_free(struct iswi_ublk_queue *queue);

#endif
