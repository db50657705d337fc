/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernel's messages: faults, and events that tell of changes to the arena. One thread reads
 * them, others serve them in their order; they take turns.
 *
 * An event is a program's call that goes on as soon as the event was read: from then on the kernel
 * and the masks disagree until it is served. So the reader closes a gate before it reads and counts
 * the events before it opens it again; who changes the arena goes through the gate, and is refused
 * while there are events (F3). An operation in the gate never waits for the reader: the kernel
 * answers EAGAIN where it would, and what the operation reads is there (F6).
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <linux/futex.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "far/memory.h"
#include "far/real.h"

#define MESSAGES (1u << 14)
#define BATCH    32u
#define SPINS    200u

static void futex_wait(atomic_uint *word, unsigned int value)
{
	(void)iswf_real()->syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(atomic_uint *word)
{
	(void)iswf_real()->syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* ------------------------------------------------------------------- the gate */

/* All seq_cst: who enters looks at `readings` after it has raised `inside`; the reader looks at
 * `inside` after it has raised `readings`. */
static atomic_uint inside;   /* operations; a futex, for the reader */
static atomic_uint readings; /* odd: the reader reads; even: the gate is open */
static atomic_uint heard;    /* events that were read */
static atomic_uint served;   /* of these */

/* Until the reader has looked at what it is reading now. */
static void await_reading(void)
{
	unsigned int reading = atomic_load(&readings);

	for (uint32_t spins = 0; reading & 1 && atomic_load(&readings) == reading; spins++)
		if (spins >= SPINS)
			iswf_pause(ISWF_AGAIN_NS);
}

bool iswf_enter(void)
{
	for (;;) {
		atomic_fetch_add(&inside, 1);
		if (!(atomic_load(&readings) & 1)) {
			if (atomic_load(&served) == atomic_load(&heard))
				return true;
			iswf_leave();
			return false;
		}
		iswf_leave();
		await_reading();
	}
}

void iswf_leave(void)
{
	if (atomic_fetch_sub(&inside, 1) == 1 && atomic_load(&readings) & 1)
		futex_wake(&inside);
}

void iswf_await_events(void)
{
	unsigned int until;

	await_reading();
	until = atomic_load(&heard);
	while ((int)(atomic_load(&served) - until) < 0)
		iswf_pause(ISWF_AGAIN_NS);
}

static void close_gate(void)
{
	unsigned int operations;

	atomic_fetch_add(&readings, 1);
	while ((operations = atomic_load(&inside)) != 0)
		futex_wait(&inside, operations);
}

static void open_gate(void)
{
	atomic_fetch_add(&readings, 1);
}

/* ------------------------------------------------------------------- own discards */

static atomic_uintptr_t own_from, own_end; /* seq_cst, with the reader */

void iswf_begin_discard(const char *at, size_t bytes)
{
	atomic_store(&own_from, (uintptr_t)at);
	atomic_store(&own_end, (uintptr_t)at + bytes);
}

/* The events were read, but the reader may not have looked at them yet. */
void iswf_end_discard(void)
{
	await_reading();
	atomic_store(&own_end, 0);
}

/* Of a discard over several mappings there is an event for each. */
static bool is_own(const struct uffd_msg *msg)
{
	return msg->event == UFFD_EVENT_REMOVE && msg->arg.remove.start >= atomic_load(&own_from) &&
	       msg->arg.remove.end <= atomic_load(&own_end);
}

/* ------------------------------------------------------------------- the queue */

struct message {
	uint8_t event;
	char *from, *end, *to;
};

static struct message messages[MESSAGES];
static atomic_uint written, taken; /* by who reads; under take_lock */
static pthread_mutex_t take_lock = PTHREAD_MUTEX_INITIALIZER;

static bool is_queue_empty(void)
{
	return atomic_load(&taken) == atomic_load(&written);
}

static void hand_on(const struct message *message)
{
	unsigned int at = atomic_load_explicit(&written, memory_order_relaxed);

	/* Threads and their unread events: never so many. */
	while (at - atomic_load(&taken) >= MESSAGES)
		iswf_pause(ISWF_AGAIN_NS);
	messages[at % MESSAGES] = *message;
	atomic_store(&written, at + 1);
}

/* False: nobody needs to hear of it. */
static bool hear(const struct uffd_msg *msg, struct message *out)
{
	*out = (struct message){.event = msg->event};
	switch (msg->event) {
	case UFFD_EVENT_PAGEFAULT:
		out->from = (char *)(uintptr_t)(msg->arg.pagefault.address &
						~(__u64)(ISWF_PAGE_BYTES - 1));
		return true;
	case UFFD_EVENT_REMOVE:
	case UFFD_EVENT_UNMAP:
		if (is_own(msg))
			return false;
		out->from = (char *)(uintptr_t)msg->arg.remove.start;
		out->end = (char *)(uintptr_t)msg->arg.remove.end;
		break;
	case UFFD_EVENT_REMAP:
		out->from = (char *)(uintptr_t)msg->arg.remap.from;
		out->end = out->from + msg->arg.remap.len;
		out->to = (char *)(uintptr_t)msg->arg.remap.to;
		break;
	default:
		return false;
	}
	atomic_fetch_add(&heard, 1);
	return true;
}

/* Waits for the kernel's messages and hands them on. */
static void read_messages(void)
{
	struct pollfd wait = {.fd = iswf_uffd, .events = POLLIN};
	struct uffd_msg msgs[BATCH];
	struct message heard_now[BATCH];
	uint32_t count = 0;
	ssize_t got;

	(void)poll(&wait, 1, -1);
	close_gate();
	got = read(iswf_uffd, msgs, sizeof(msgs));
	for (ssize_t i = 0; i * (ssize_t)sizeof(*msgs) < got; i++)
		if (hear(&msgs[i], &heard_now[count]))
			count++;
	open_gate();
	for (uint32_t i = 0; i < count; i++)
		hand_on(&heard_now[i]);
}

/*
 * Serves the next message; false: there is none. The lock is held over an event, so that faults
 * that came after it are served after it.
 */
static bool serve_one(void)
{
	struct message message;
	unsigned int at;

	pthread_mutex_lock(&take_lock);
	at = atomic_load_explicit(&taken, memory_order_relaxed);
	if (at == atomic_load(&written)) {
		pthread_mutex_unlock(&take_lock);
		return false;
	}
	message = messages[at % MESSAGES];
	atomic_store(&taken, at + 1);
	if (message.event == UFFD_EVENT_PAGEFAULT) {
		pthread_mutex_unlock(&take_lock);
		iswf_fault(message.from);
		return true;
	}
	iswf_removed(message.from, message.end, message.event != UFFD_EVENT_REMOVE, message.to);
	atomic_fetch_add(&served, 1);
	pthread_mutex_unlock(&take_lock);
	return true;
}

/* ------------------------------------------------------------------- the threads */

/*
 * They take turns at reading: who has read serves, and another one reads on, so that no fault waits
 * until a second thread has woken. One never serves, since who serves may need a reader.
 */
static pthread_mutex_t reader = PTHREAD_MUTEX_INITIALIZER;
static atomic_uint serving;

static bool begin_serving(void)
{
	unsigned int now = atomic_load(&serving);

	while (now < ISWF_SERVE_THREADS - 1)
		if (atomic_compare_exchange_weak(&serving, &now, now + 1))
			return true;
	return false;
}

/* All that is in the queue, and what comes there until this one no longer counts as serving. */
static void serve(void)
{
	do {
		while (serve_one())
			;
		atomic_fetch_sub(&serving, 1);
	} while (!is_queue_empty() && begin_serving());
}

void *iswf_serve_main(void *arg)
{
	(void)arg;
	for (;;) {
		pthread_mutex_lock(&reader);
		do
			read_messages();
		while (is_queue_empty() || !begin_serving());
		pthread_mutex_unlock(&reader);
		serve();
	}
	return NULL;
}
