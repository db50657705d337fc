/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The floor under swapping through FUSE and a loop device: our front end over an engine that only
 * copies to and from memory of this process, at once. Prints {"disk": ...} and serves until its
 * input ends.
 *
 *     isw-bench-fuse-floor --mountpoint DIR --size-bytes N
 *
 * The engine's functions that a front end calls are defined here, so the library's own are not
 * linked in.
 */
#define _GNU_SOURCE 1
#include <sys/mman.h>

#include "bench.h"
#include "engine/request.h"
#include "frontend/fuse_frontend.h"

struct isw_engine {
	uint64_t size_bytes;
	unsigned char *bytes;
};

uint64_t iswi_engine_size_bytes(const isw_engine *engine)
{
	return engine->size_bytes;
}

uint64_t iswi_engine_far_bytes(const isw_engine *engine)
{
	(void)engine;
	return 0;
}

uint32_t iswi_engine_request_bytes_max(const isw_engine *engine)
{
	(void)engine;
	return 1u << 20;
}

uint32_t iswi_engine_requests_max(const isw_engine *engine)
{
	(void)engine;
	return 128;
}

void iswi_engine_frontend_down(isw_engine *engine, int error)
{
	(void)engine;
	bench_die("the front end ended: %s", strerror(-error));
}

void iswi_engine_submit(isw_engine *engine, struct iswi_req *req)
{
	unsigned char *place = engine->bytes + req->offset;

	if (req->op == ISWI_READ)
		memcpy(req->data, place, req->length);
	else if (req->op == ISWI_WRITE)
		memcpy(place, req->data, req->length);
	else if (req->op != ISWI_FLUSH)
		memset(place, 0, req->length);
	req->done(req, 0);
}

void iswi_engine_submit_plugged(isw_engine *engine, struct iswi_req *req, struct iswi_plug *plug)
{
	(void)plug;
	iswi_engine_submit(engine, req);
}

void iswi_engine_unplug(isw_engine *engine, struct iswi_plug *plug)
{
	(void)engine;
	(void)plug;
}

int main(int argc, char **argv)
{
	const char *mountpoint = bench_option(argc, argv, "mountpoint", NULL);
	struct isw_engine engine = {
		.size_bytes = bench_number(argc, argv, "size-bytes", 1u << 30),
	};
	const struct isw_frontend_config config = {.path = mountpoint};
	struct isw_error error = {0};
	isw_frontend *frontend;
	char line[16];

	bench_die_with_parent();
	if (!mountpoint)
		bench_die("--mountpoint is missing");
	/* Not swapped out itself, and no page fault on the way: as in the real device. */
	engine.bytes = mmap(NULL, engine.size_bytes, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (engine.bytes == MAP_FAILED)
		bench_die("no memory for the device");
	(void)mlockall(MCL_CURRENT | MCL_FUTURE);
	if (iswi_fuse_ops.start(&engine, &config, &frontend, &error))
		bench_die("%s", error.text);
	printf("{\"disk\": \"%s/disk\"}\n", mountpoint);
	fflush(stdout);
	while (read(STDIN_FILENO, line, sizeof(line)) > 0)
		;
	iswi_fuse_ops.destroy(frontend);
	return 0;
}
