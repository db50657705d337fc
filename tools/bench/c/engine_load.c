/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Load on a whole engine, as a front end makes it: requests submitted on this program's threads,
 * completed on the transport's, to a store that another process serves.
 *
 *     isw-bench-engine-load --port P --ticket T --slots N --slab-bytes B
 *                      [--op read|write] [--depth 1] [--threads 1] [--queues 2] [--ms 1000]
 *                      [--request-bytes 4096] [--backup PATH] [--watch PID]
 *                      [--host ADDRESS] [--rdma 1] [--seal 1] [--wait-ms 10000]
 *
 * "done": from submit until the engine says that the request is done. "round": until the thread
 * that submitted it has woken up and seen that. --watch adds another process's processor time.
 *
 * With --rdma pages go by RDMA. What a device and a donor tell each other over their control
 * session goes over standard output and input then: first a line of JSON with our ends, then an
 * answer, see rdma_session.h.
 */
#define _GNU_SOURCE 1
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "bench.h"
#include "engine/request.h"
#include "rdma_session.h"

#define SAMPLES_MAX       (4u << 20)
#define FILL_BYTES        (256u << 10)
#define FILL_DEPTH        8u
#define THREADS_MAX       16u
#define REQUEST_BYTES_MAX (1u << 20)
#define SLOTS_MAX         64u

struct worker;

struct item {
	struct iswi_req req;
	struct worker *worker;
	struct item *next;
	uint64_t start_ns, done_ns;
};

struct worker {
	struct load *load;
	pthread_t thread;
	struct item *items;
	uint32_t depth;
	uint64_t random;
	struct iswi_plug plug;
	struct bench_samples done, round;
	/* Pushed by whoever completes; taken whole by the worker. seq_cst, against sleeping. */
	_Atomic(struct item *) arrived;
	atomic_uint sleeping; /* a futex */
};

struct load {
	isw_engine *engine;
	enum iswi_req_op op;
	uint64_t pages, request_pages;
	uint64_t buffer_bytes; /* of each request */
	uint64_t next_fill;    /* filling: the next request's page */
	uint64_t end_ns;
	bool filling;
	struct worker workers[THREADS_MAX];
	uint32_t threads;
};

/* ------------------------------------------------------------------------ requests */

static void request_done(struct iswi_req *req, int error)
{
	struct item *item = ISWI_CONTAINER(req, struct item, req);
	struct worker *w = item->worker;

	if (error)
		bench_die("a request failed: %s", strerror(-error));
	item->done_ns = iswi_now_ns();
	item->next = atomic_load(&w->arrived);
	while (!atomic_compare_exchange_weak(&w->arrived, &item->next, item))
		;
	if (atomic_exchange(&w->sleeping, 0))
		syscall(SYS_futex, &w->sleeping, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static struct item *wait_arrived(struct worker *w)
{
	for (;;) {
		struct item *list = atomic_exchange(&w->arrived, NULL);

		if (list)
			return list;
		atomic_store(&w->sleeping, 1);
		if (atomic_load(&w->arrived))
			atomic_store(&w->sleeping, 0);
		else
			syscall(SYS_futex, &w->sleeping, FUTEX_WAIT_PRIVATE, 1, NULL, NULL, 0);
	}
}

/* Each page starts with its own number, so that a wrong page shows. */
static void mark(struct item *item)
{
	for (uint64_t at = 0; at < item->req.length; at += ISW_PAGE_BYTES) {
		uint64_t page = (item->req.offset + at) / ISW_PAGE_BYTES;

		memcpy((char *)item->req.data + at, &page, sizeof(page));
	}
}

static void check(const struct item *item)
{
	for (uint64_t at = 0; at < item->req.length; at += ISW_PAGE_BYTES) {
		uint64_t page;

		memcpy(&page, (char *)item->req.data + at, sizeof(page));
		if (page != (item->req.offset + at) / ISW_PAGE_BYTES)
			bench_die("wrong bytes at offset %llu",
				  (unsigned long long)(item->req.offset + at));
	}
}

/* False when there is nothing more to do. */
static bool submit(struct worker *w, struct item *item)
{
	struct load *load = w->load;
	uint64_t pages = load->request_pages, page;

	if (load->filling) {
		page = load->next_fill;
		if (page >= load->pages)
			return false;
		load->next_fill += pages;
	} else {
		if (iswi_now_ns() >= load->end_ns)
			return false;
		page = bench_random(&w->random) % (load->pages / pages) * pages;
	}
	item->req.op = load->op;
	item->req.offset = page * ISW_PAGE_BYTES;
	item->req.length = ISWI_MIN(pages, load->pages - page) * ISW_PAGE_BYTES;
	item->req.done = request_done;
	if (load->op == ISWI_WRITE)
		mark(item);
	item->start_ns = iswi_now_ns();
	iswi_engine_submit_plugged(load->engine, &item->req, &w->plug);
	return true;
}

static void *worker_run(void *arg)
{
	struct worker *w = arg;
	uint32_t in_flight = 0;

	for (uint32_t i = 0; i < w->depth; i++)
		in_flight += submit(w, &w->items[i]);
	iswi_engine_unplug(w->load->engine, &w->plug);
	while (in_flight) {
		struct item *item = wait_arrived(w);

		while (item) {
			struct item *next = item->next;
			uint64_t now_ns = iswi_now_ns();

			if (!w->load->filling) {
				bench_samples_add(&w->done, item->done_ns - item->start_ns);
				bench_samples_add(&w->round, now_ns - item->start_ns);
			}
			if (w->load->op == ISWI_READ)
				check(item);
			in_flight -= !submit(w, item);
			item = next;
		}
		iswi_engine_unplug(w->load->engine, &w->plug);
	}
	return NULL;
}

/* --------------------------------------------------------------------------- phases */

static void worker_init(struct load *load, uint32_t index, uint32_t depth)
{
	struct worker *w = &load->workers[index];
	unsigned char *memory = mmap(NULL, depth * load->buffer_bytes, PROT_READ | PROT_WRITE,
				     MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

	if (memory == MAP_FAILED)
		bench_die("no memory");
	w->load = load;
	w->depth = depth;
	w->random = 0x9e3779b97f4a7c15ull * (index + 1);
	w->items = calloc(depth, sizeof(*w->items));
	bench_samples_init(&w->done, SAMPLES_MAX / load->threads);
	bench_samples_init(&w->round, SAMPLES_MAX / load->threads);
	for (uint32_t i = 0; i < depth; i++) {
		w->items[i].worker = w;
		w->items[i].req.data = memory + i * load->buffer_bytes;
		bench_random(&w->random);
	}
}

static void run(struct load *load)
{
	for (uint32_t i = 0; i < load->threads; i++)
		if (pthread_create(&load->workers[i].thread, NULL, worker_run, &load->workers[i]))
			bench_die("no thread");
	for (uint32_t i = 0; i < load->threads; i++)
		pthread_join(load->workers[i].thread, NULL);
}

/* Writes every page once, so that reads come from the donor. */
static void fill(struct load *load)
{
	uint32_t threads = load->threads;

	load->filling = true;
	load->op = ISWI_WRITE;
	load->request_pages = FILL_BYTES / ISW_PAGE_BYTES;
	load->threads = 1;
	run(load);
	load->filling = false;
	load->threads = threads;
	if (isw_engine_settle(load->engine, 60000))
		bench_die("the engine does not settle");
}

static isw_engine *connect_engine(int argc, char **argv, uint64_t requests_max)
{
	const char *backup = bench_option(argc, argv, "backup", NULL);
	uint32_t slots = (uint32_t)bench_number(argc, argv, "slots", 4), remote;
	uint32_t wait_ms = (uint32_t)bench_number(argc, argv, "wait-ms", 10000);
	bool rdma = bench_number(argc, argv, "rdma", 0) != 0;
	uint64_t slab_bytes = bench_number(argc, argv, "slab-bytes", 64u << 20);
	struct isw_engine_config config = {
		.size_bytes = slots * slab_bytes,
		.slab_bytes = slab_bytes,
		.staging_pages = 16384,
		.request_bytes_max = REQUEST_BYTES_MAX,
		.requests_max = (uint32_t)requests_max,
		.remotes_max = 1,
		.state_fd = -1,
		.backup_write_bytes_max = 1u << 20,
		.backup_writers = 2,
		.backup_readers = 4,
		.flags = backup ? 0 : ISW_ENGINE_NO_BACKUP,
		.seal_key_fd = -1,
	};
	const char *tickets[ISW_RDMA_QUEUES_MAX];
	struct isw_remote_config donor = {
		.host = bench_option(argc, argv, "host", "127.0.0.1"),
		.port = (uint16_t)bench_number(argc, argv, "port", 0),
		.tickets = tickets,
		.queues = (uint32_t)bench_number(argc, argv, "queues", 2),
		.connect_ms_max = wait_ms,
		.request_ms_max = wait_ms,
		.export_bytes = slots * slab_bytes,
	};
	struct isw_rdma_end ends[ISW_RDMA_QUEUES_MAX];
	struct isw_rdma_key keys[SLOTS_MAX];
	struct isw_error error = {0};
	isw_engine *engine;

	for (uint32_t i = 0; i < ISW_RDMA_QUEUES_MAX; i++)
		tickets[i] = bench_option(argc, argv, "ticket", "");
	if (slots > SLOTS_MAX || donor.queues > ISW_RDMA_QUEUES_MAX)
		bench_die("at most %u slots and %u queues", SLOTS_MAX, ISW_RDMA_QUEUES_MAX);
	if (bench_number(argc, argv, "seal", 0)) {
		config.flags |= ISW_ENGINE_SEAL;
		if (isw_seal_key_make(&config.seal_key_fd, &error))
			bench_die("%s", error.text);
	}
	if (isw_engine_create(&config, backup, &engine, &error))
		bench_die("%s", error.text);
	if (rdma) {
		if (isw_rdma_offer_make(engine, donor.host, donor.queues, slots, &donor.rdma,
					&error))
			bench_die("%s", error.text);
		bench_tell_ends(donor.rdma, donor.queues);
		bench_hear_answer(ends, donor.queues, &donor.rdma_probe, keys, slots);
		donor.rdma_peers = ends;
	}
	if (isw_remote_connect(engine, &donor, &remote, &error))
		bench_die("%s", error.text);
	for (uint32_t i = 0; i < slots; i++)
		if ((rdma && isw_remote_slot_key(engine, remote, i, &keys[i])) ||
		    isw_slab_map(engine, i, remote, i, i + 1))
			bench_die("slab %u was not mapped", i);
	return engine;
}

static struct bench_samples merged(const struct load *load, bool round)
{
	struct bench_samples all;

	bench_samples_init(&all, SAMPLES_MAX);
	for (uint32_t i = 0; i < load->threads; i++) {
		const struct bench_samples *s =
			round ? &load->workers[i].round : &load->workers[i].done;

		memcpy(all.ns + all.used, s->ns, s->used * sizeof(*s->ns));
		all.used += s->used;
		all.count += s->count;
		all.sum_ns += s->sum_ns;
	}
	return all;
}

static void print(const struct load *load, double took_s, double own_cpu_s, double watched_cpu_s,
		  const struct bench_host *host, uint64_t elsewhere)
{
	struct bench_samples done = merged(load, false), round = merged(load, true);
	double pages = (double)(done.count * load->request_pages);

	printf("{\"seconds\": %.3f, \"requests\": %llu, \"iops\": %.1f, \"pages\": %.0f, "
	       "\"pages_not_from_donor\": %llu, \"cpu_us_per_page\": %.4f, "
	       "\"watched_cpu_us_per_page\": %.4f, \"host_softirq_us_per_page\": %.4f, "
	       "\"host_kernel_us_per_page\": %.4f, \"host_busy_us_per_page\": %.4f, ",
	       took_s, (unsigned long long)done.count, (double)done.count / took_s, pages,
	       (unsigned long long)elsewhere, own_cpu_s * 1e6 / pages, watched_cpu_s * 1e6 / pages,
	       host->softirq_s * 1e6 / pages, host->kernel_s * 1e6 / pages,
	       host->busy_s * 1e6 / pages);
	bench_samples_print(&done, "done_us");
	printf(", ");
	bench_samples_print(&round, "round_us");
	printf("}\n");
	free(done.ns);
	free(round.ns);
}

int main(int argc, char **argv)
{
	static struct load load;
	static struct isw_engine_stats stats;
	uint32_t depth = (uint32_t)bench_number(argc, argv, "depth", 1);
	uint64_t watched = bench_number(argc, argv, "watch", 0);
	uint64_t request_bytes = bench_number(argc, argv, "request-bytes", ISW_PAGE_BYTES);
	double own_cpu_s, watched_cpu_s, took_s;
	struct bench_host before, host;
	uint64_t start_ns, elsewhere;

	bench_die_with_parent();
	load.threads = (uint32_t)bench_number(argc, argv, "threads", 1);
	if (!load.threads || load.threads > THREADS_MAX || depth < load.threads || depth > 256)
		bench_die("1 to %u threads, depth from there to 256", THREADS_MAX);
	if (!request_bytes || request_bytes % ISW_PAGE_BYTES || request_bytes > REQUEST_BYTES_MAX)
		bench_die("--request-bytes: whole pages, at most %u", REQUEST_BYTES_MAX);
	load.buffer_bytes = ISWI_MAX(request_bytes, (uint64_t)FILL_BYTES);
	load.engine = connect_engine(argc, argv, ISWI_MAX(depth, FILL_DEPTH));
	load.pages = iswi_engine_size_bytes(load.engine) / ISW_PAGE_BYTES;
	for (uint32_t i = 0; i < load.threads; i++)
		worker_init(&load, i, (depth + i) / load.threads);
	fill(&load);

	load.op = strcmp(bench_option(argc, argv, "op", "read"), "write") ? ISWI_READ : ISWI_WRITE;
	load.request_pages = request_bytes / ISW_PAGE_BYTES;
	isw_engine_stats(load.engine, &stats);
	elsewhere = stats.pages_in - stats.pages_in_remote;
	own_cpu_s = bench_clock_s(CLOCK_PROCESS_CPUTIME_ID);
	watched_cpu_s = bench_cpu_of(watched);
	before = bench_host_times();
	start_ns = iswi_now_ns();
	load.end_ns = start_ns + bench_number(argc, argv, "ms", 1000) * 1000000;
	run(&load);
	took_s = (double)(iswi_now_ns() - start_ns) / 1e9;
	host = bench_host_times();
	host.softirq_s -= before.softirq_s;
	host.kernel_s -= before.kernel_s;
	host.busy_s -= before.busy_s;
	watched_cpu_s = bench_cpu_of(watched) - watched_cpu_s;
	own_cpu_s = bench_clock_s(CLOCK_PROCESS_CPUTIME_ID) - own_cpu_s;
	isw_engine_stats(load.engine, &stats);
	elsewhere = stats.pages_in - stats.pages_in_remote - elsewhere;
	print(&load, took_s, own_cpu_s, watched_cpu_s, &host, elsewhere);
	isw_engine_destroy(load.engine);
	return 0;
}
