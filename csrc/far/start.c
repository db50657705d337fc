/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The agent's beginning and end in a process, and its threads. It begins when the program asks an
 * allocator for something large, in the program's own call: a thread that is started inside an
 * allocator's mmap would wait for that allocator (F9).
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "far/agent.h"
#include "far/real.h"

#define VARIABLE      "INFINISWAP_FAR" /* JOB_FD:DEVICE_FD:LIMIT_BYTES:VERSION:CGROUP */
#define FAULT_THREADS 2u
#define EVICT_THREADS ISWF_WRITE_SLOTS
#define STACK_BYTES   (128u * 1024u)
#define NICE_FAULTS   (-15)
/* So many blocks lie aside, in a hundred of the budget, before the oldest is sent. */
#define ASIDE_SHARE 10
/* Evicted ahead of need: room for this many blocks is kept. */
#define AHEAD_PAGES (8 * (int64_t)ISWF_BLOCK_PAGES)
#define WORK_NS     5000000

#define A (&iswf_agent)

atomic_int iswf_phase;

uint64_t iswf_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ------------------------------------------------------------------- threads */

static void *fault_main(void *arg)
{
	(void)arg;
	prctl(PR_SET_NAME, "far-fault");
	/* Best effort: who faults waits for us. */
	(void)setpriority(PRIO_PROCESS, (id_t)iswf_real()->syscall(SYS_gettid), NICE_FAULTS);
	for (;;)
		iswf_serve_one();
	return NULL;
}

/* Lock held: what there is to do. Memory is evicted ahead of need, through a delay aside. */
static bool wants_eviction(int64_t *aside_max_out)
{
	int64_t lacking = A->held_pages + AHEAD_PAGES - A->budget_pages;

	*aside_max_out = A->budget_pages * ASIDE_SHARE / 100 / ISWF_BLOCK_PAGES;
	return lacking > 0;
}

static bool work_once(void)
{
	int64_t aside_max;
	bool evict, full;

	pthread_mutex_lock(&A->lock);
	evict = wants_eviction(&aside_max);
	full = A->queues[ISWF_Q_ASIDE].count > aside_max;
	pthread_mutex_unlock(&A->lock);
	if (!evict)
		return iswf_drop();
	if (!full && iswf_evict())
		return true;
	return iswf_send() || iswf_evict() || iswf_drop();
}

static void *evict_main(void *arg)
{
	(void)arg;
	prctl(PR_SET_NAME, "far-evict");
	for (;;) {
		struct timespec until;

		if (iswf_budget_look())
			iswf_link_tell();
		if (work_once())
			continue;
		clock_gettime(CLOCK_REALTIME, &until);
		until.tv_nsec += WORK_NS;
		if (until.tv_nsec >= 1000000000) {
			until.tv_nsec -= 1000000000;
			until.tv_sec++;
		}
		pthread_mutex_lock(&A->lock);
		pthread_cond_timedwait(&A->work, &A->lock, &until);
		pthread_mutex_unlock(&A->lock);
	}
	return NULL;
}

static int start_thread(void *(*run)(void *))
{
	pthread_attr_t attr;
	pthread_t thread;
	int err = pthread_attr_init(&attr);

	if (err != 0)
		return -err;
	pthread_attr_setstacksize(&attr, STACK_BYTES);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	err = pthread_create(&thread, &attr, run, NULL);
	pthread_attr_destroy(&attr);
	return -err;
}

static int start_threads(void)
{
	int code = start_thread(iswf_reader_main);

	for (uint32_t i = 0; i < FAULT_THREADS && code == 0; i++)
		code = start_thread(fault_main);
	for (uint32_t i = 0; i < EVICT_THREADS && code == 0; i++)
		code = start_thread(evict_main);
	if (code == 0)
		code = start_thread(iswf_link_main);
	if (code == 0)
		code = start_thread(iswf_errand_main);
	return code;
}

/* ------------------------------------------------------------------- forks */

/*
 * A forked child has no agent and gets nothing of the arena that is not the kernel's. So all that
 * is in use comes home first, and stays. Others allocate nothing more until the child is made.
 */
static void bring_all_home(enum iswf_why why)
{
	bool more;

	pthread_mutex_lock(&A->lock);
	A->resting = true;
	do {
		more = false;
		for (uint32_t i = 0; i < A->blocks_count && !more; i++)
			more = !A->blocks[i].left && iswf_mask_any(&A->blocks[i].live);
		if (more)
			iswf_hand_back(0, A->blocks_count, true, why);
	} while (more);
}

static void before_fork(void)
{
	bring_all_home(ISWF_WHY_FORK);
}

static void after_fork(void)
{
	A->resting = false;
	pthread_mutex_unlock(&A->lock);
}

static void in_child(void)
{
	atomic_store(&iswf_phase, ISWF_REFUSED);
	pthread_mutex_unlock(&A->lock);
}

void iswf_end(void)
{
	if (atomic_load(&iswf_phase) != ISWF_ON)
		return;
	atomic_store(&iswf_phase, ISWF_REFUSED);
	bring_all_home(ISWF_WHY_ENDED);
	pthread_mutex_unlock(&A->lock);
}

/* ------------------------------------------------------------------- start */

struct settings {
	int job_fd, device_fd, version;
	unsigned long long limit_bytes;
	char cgroup[384];
};

static bool read_settings(struct settings *settings)
{
	const char *text = getenv(VARIABLE);

	return text != NULL &&
	       sscanf(text, "%d:%d:%llu:%d:%383[^\n]", &settings->job_fd, &settings->device_fd,
		      &settings->limit_bytes, &settings->version, settings->cgroup) == 5;
}

static int set_up(const struct settings *settings)
{
	uint32_t blocks = 0;
	int uffd = iswf_memory_open(settings->device_fd), code;

	if (uffd < 0)
		return uffd;
	code = iswf_link_open(settings->job_fd, uffd, &blocks);
	if (code == 0)
		code = iswf_budget_open(settings->limit_bytes, settings->version, settings->cgroup);
	if (code == 0)
		code = iswf_arena_init((uint64_t)blocks * ISWF_BLOCK_PAGES);
	if (code == 0)
		code = iswf_memory_init(blocks);
	if (code == 0)
		code = -pthread_atfork(before_fork, after_fork, in_child);
	return code;
}

bool iswf_start(void)
{
	struct settings settings;
	sigset_t all, before;
	int phase = atomic_load(&iswf_phase), code;

	if (phase == ISWF_ON)
		return true;
	if ((phase != ISWF_OFF && phase != ISWF_WANTED) ||
	    !atomic_compare_exchange_strong(&iswf_phase, &phase, ISWF_STARTING))
		return false;
	A->ops = &iswf_real_ops;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); /* libc keeps its own out of it */
	code = read_settings(&settings) ? set_up(&settings) : -ENOENT;
	if (code == 0)
		code = start_threads();
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	atomic_store(&iswf_phase, code == 0 ? ISWF_ON : ISWF_REFUSED);
	return code == 0;
}

/* Descriptors that were inherited for us are spared from the beginning. */
__attribute__((constructor)) static void spare_inherited(void)
{
	struct settings settings;

	if (!read_settings(&settings)) {
		atomic_store(&iswf_phase, ISWF_REFUSED);
		return;
	}
	iswf_keep_own(settings.job_fd);
	if (settings.device_fd >= 0)
		iswf_keep_own(settings.device_fd);
}
