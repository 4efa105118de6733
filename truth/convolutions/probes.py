"""What a convolution takes beside its inputs and outputs: forward, and backward with all gradients. One JSON row each."""
import json, random, sys, time
import torch
F = torch.nn.functional
DT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
r = random.Random(7); out = open(sys.argv[1], "a"); t0 = time.time()
cases = []
for c, o in [(4,320),(320,320),(320,640),(640,640),(640,1280),(1280,1280),(2560,1280),(1920,640),(960,320),(320,4),(128,128),(256,256),(512,512),(3,128),(512,4),(128,3),(64,64),(96,192),(48,48),(33,65)]:
    for n in (8, 16, 32, 64, 128, 256):
        for k, s in ((3,1),(3,2),(1,1)):
            cases.append((c,o,n,k,s))
r.shuffle(cases)
def measure(c,o,n,k,s,b,dt,cl):
    torch.cuda.empty_cache()
    x = torch.randn(b,c,n,n,device="cuda",dtype=DT[dt]).requires_grad_(); w = torch.randn(o,c,k,k,device="cuda",dtype=DT[dt]).requires_grad_()
    if cl: x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    m = torch.cuda.memory_allocated; p = torch.cuda.max_memory_allocated
    row = {"c":c,"o":o,"n":n,"k":k,"s":s,"b":b,"dtype":dt,"channels_last":cl}
    a0 = m(); torch.cuda.reset_peak_memory_stats(); y = F.conv2d(x,w,None,s,k//2); torch.cuda.synchronize()
    row["fwd"] = p()-a0; row["out"] = m()-a0; row["format"] = str(y.is_contiguous(memory_format=torch.channels_last))
    g = torch.randn_like(y); a0 = m(); torch.cuda.reset_peak_memory_stats(); y.backward(g); torch.cuda.synchronize()
    row["bwd"] = p()-a0; row["grads"] = m()-a0; row["reserved"] = torch.cuda.memory_reserved()
    del x, w, y, g
    return row
torch.zeros(1,device="cuda"); F.conv2d(torch.randn(1,8,8,8,device="cuda",dtype=torch.bfloat16), torch.randn(8,8,3,3,device="cuda",dtype=torch.bfloat16)); 
for c,o,n,k,s in cases:
    for dt in ("bf16","fp32","fp16"):
        if time.time()-t0 > float(sys.argv[2]): sys.exit()
        b = r.choice([1,2,4]); cl = r.random() < 0.15
        if b*max(c,o)*n*n > 2**30: continue
        try: row = measure(c,o,n,k,s,b,dt,cl)
        except Exception as e: row = {"c":c,"o":o,"n":n,"k":k,"s":s,"b":b,"dtype":dt,"error":repr(e)[:100]}
        out.write(json.dumps(row)+"\n"); out.flush()
